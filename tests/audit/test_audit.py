"""The auditor: a good run passes, and each broken promise is found and named, on a real server."""

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from msgspec.structs import replace

from streamrl.bus import BusAddress
from streamrl.bus.protocol import Bus, Message
from streamrl.config.loss import LossConfig
from streamrl.config.tree import TasksConfig
from streamrl.consumers.training.carried import CARRIED_FILE, carried_files
from streamrl.schemas.codec import encode
from streamrl.schemas.control import Grant, Latest, Position
from streamrl.schemas.ledger import Drop, Gap, LedgerEntry, Used
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import HEADER_TASK, Subjects
from streamrl.schemas.versions import Version
from tests.support.audit.audit import audit
from tests.support.audit.forge import Forged, entry, good_run, manifest, rows

pytestmark = pytest.mark.nats
AUDIT = Path(__file__).parents[1] / "support" / "audit" / "audit.py"
Bend = Callable[[Forged], object]


async def problems(forged: Forged, bus: Bus, address: BusAddress, run: str, *, complete: bool = True) -> list[str]:
    await forged.put(bus, run)
    report = await audit(address.url, address.user, address.password, run, complete=complete)
    assert report.ok == (not report.problems)
    return report.problems


async def test_a_good_run_passes(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    await good_run().put(nats_bus, run_id)
    report = await audit(nats_address.url, nats_address.user, nats_address.password, run_id, complete=True)
    assert report.problems == []
    assert report.counts == {
        "versions": 3,
        "epochs": 1,
        "fences": 1,
        "messages": 14,
        "issued": 13,
        "trained": 6,
        "dropped": 4,
        "drops": 5,
        "oldest": 1,
    }


async def test_a_run_before_its_first_version_passes(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    forged = good_run()
    forged.entries, forged.manifests, forged.dead = [], [manifest(0)], set()
    forged.samples, forged.issued, forged.queued = forged.samples[:2], 4, {1, 2, 3}
    forged.keys = [("granted", Grant(4, 0, 0)), ("positions/main", Position("main", "samples", 1, Version()))]
    assert await problems(forged, nats_bus, nats_address, run_id, complete=False) == []


async def test_a_run_trimmed_below_its_position_passes(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    forged = good_run()
    forged.trim = 9
    assert await problems(forged, nats_bus, nats_address, run_id) == []


async def test_what_a_checkpoint_carries_is_not_lost(nats_bus: Bus, nats_address: BusAddress, run_id: str, tmp_path: Path) -> None:
    """The rest of task 7, whose message was trimmed from a full stream."""
    forged = good_run()
    forged.queued.discard(7)
    await forged.put(nats_bus, run_id)
    (tmp_path / "checkpoints" / "main").mkdir(parents=True)
    subject = Subjects(run_id).samples("main")
    reads: dict[str, Any] = {"url": nats_address.url, "user": nats_address.user, "password": nats_address.password, "run": run_id}
    assert any("task 7 is lost" in problem for problem in (await audit(**reads, directory=tmp_path)).problems)
    carried = carried_files([Message(subject, 99, rows(7), {HEADER_TASK: "7"})])
    (tmp_path / "checkpoints" / "main" / CARRIED_FILE).write_bytes(carried[CARRIED_FILE])
    assert (await audit(**reads, directory=tmp_path)).problems == []


async def test_what_an_entry_has_ended_is_not_lost(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    """A rollout of task 7 failed, an entry says so, and its message was trimmed; the other one is on the stream, not decided on yet."""
    forged = good_run()
    forged.queued.discard(7)
    forged.samples[9] = ("tombstones", encode(Tombstone(task=7, reason="failed", rollout=0, group_size=2)), 7)
    forged.samples.append(("samples", rows(7, (1,)), 7))
    edit(2, lambda e: replace(e, drops=(*e.drops, Drop(10, 7, (0,), "failed"))))(forged)
    forged.keys[1:] = [
        ("latest/main", Latest("main", Version(0, 3), "checkpoints/main", 13, 14)),
        ("positions/main", Position("main", "samples", 14, Version(0, 3))),
    ]
    forged.trim = 10
    assert await problems(forged, nats_bus, nats_address, run_id) == []


async def test_a_forked_epoch_passes(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    forged = good_run()
    forged.entries.append(replace(forged.entries[2], version=Version(1, 3), digest="f" * 16, fence=2))
    forged.manifests.append(manifest(3, "f" * 16, epoch=1))
    assert await problems(forged, nats_bus, nats_address, run_id) == []


@pytest.mark.parametrize("said", [True, False])
async def test_entries_that_a_gap_says_are_lost_are_one_problem(nats_bus: Bus, nats_address: BusAddress, run_id: str, said: bool) -> None:
    forged = good_run()
    first, second, third = forged.entries
    gap = Gap(lost="end", missing=((2, 2),), highest=Version(0, 2), known_by="checkpoint")
    mark = replace(second, version=Version(1, 2), used=(), drops=(), staleness=(), gap=gap)
    forged.entries = [first, *([mark] if said else []), replace(third, version=Version(1, 3))]
    forged.manifests = [*(manifest(number) for number in range(3)), manifest(3, epoch=1)]
    found = await problems(forged, nats_bus, nats_address, run_id)
    assert len([problem for problem in found if "a gap (end)" in problem]) == said
    assert len(found) == 1 if said else len(found) > 3


async def test_a_short_last_warm_up_batch_passes(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    forged = good_run()
    short = replace(forged.entries[0], source="warmup", used=forged.entries[0].used[:1], staleness=(0,), num_samples=2, num_tokens=8)
    ended = (Drop(2, 1, (0,), "failed", retires=False), Drop(5, 1, (1,), "failed", retires=True))
    forged.entries[0] = replace(short, drops=(*ended, *short.drops))
    assert await problems(forged, nats_bus, nats_address, run_id, complete=False) == []


@pytest.mark.parametrize(("reason", "passes"), [("too_short", True), ("repetitive", True), ("zero_variance", False)])
async def test_a_group_of_a_refused_rollout_passes(nats_bus: Bus, nats_address: BusAddress, run_id: str, reason: str, passes: bool) -> None:
    forged = good_run()
    one = forged.entries[0]
    used, refused = (one.used[0], Used(1, (0,), (2,))), Drop(5, 1, (1,), reason)
    tokens = one.num_tokens // one.num_samples
    forged.entries[0] = replace(one, used=used, drops=(*one.drops, refused), num_samples=3, num_tokens=3 * tokens)
    found = await problems(forged, nats_bus, nats_address, run_id)
    assert (found == []) is passes and all("its rollouts [1]" in problem for problem in found)


def change(index: int, **values: Any) -> Bend:
    def bend(forged: Forged) -> None:
        forged.entries[index] = replace(forged.entries[index], **values)

    return bend


def edit(index: int, how: Callable[[LedgerEntry], LedgerEntry]) -> Bend:
    def bend(forged: Forged) -> None:
        forged.entries[index] = how(forged.entries[index])

    return bend


def sample(sequence: int, body: bytes, task: int | None = None) -> Bend:
    def bend(forged: Forged) -> None:
        forged.samples[sequence - 1] = ("samples", body, forged.samples[sequence - 1][2] if task is None else task)

    return bend


def key(name: str, value: Any) -> Bend:
    def bend(forged: Forged) -> None:
        forged.keys = [(k, value if k == name else v) for k, v in forged.keys]

    return bend


def do(*statements: Callable[[Forged], Any]) -> Bend:
    def bend(forged: Forged) -> None:
        for statement in statements:
            statement(forged)

    return bend


BOTH = (0, 1)
BENT: dict[str, tuple[Bend, str]] = {
    # Every task ends once.
    "trained twice": (edit(1, lambda e: replace(e, used=(Used(0, BOTH, (7, 7)), e.used[1]), drops=e.drops[:1])), "task 0 ended twice"),
    "trained and dropped": (edit(1, lambda e: replace(e, drops=(*e.drops, Drop(9, 6, (), "stale", retires=True)))), "task 6 ended twice"),
    "lost from the queue": (lambda f: f.queued.discard(12), "task 12 is lost"),
    "half on the stream": (lambda f: f.queued.discard(7), "task 7 is lost"),
    "trained but never issued": (lambda f: setattr(f, "issued", 10), "task 10 trained into version 3, but only 10 tasks"),
    # Every sample has one fate.
    "in no entry and no drop": (edit(1, lambda e: replace(e, drops=e.drops[:1])), "sequence 7 task 0 rollout 0 is in no entry and no drop"),
    "two fates": (edit(1, lambda e: replace(e, drops=(*e.drops, Drop(1, 0, (1,), "late")))), "sequence 1 task 0 rollout 1 has 2 fates"),
    "broken and not dropped": (edit(0, lambda e: replace(e, drops=e.drops[:1])), "broken message at sequence 4 is in 0 drops"),
    "no such rollout": (
        edit(1, lambda e: replace(e, drops=(*e.drops, Drop(9, 6, (5,), "late")))),
        "sequence 9 rollout 5, which the stream",
    ),
    "another task's message": (sample(9, rows(11, first=1), 11), "task 6 rollout 0 is not in the message at sequence 9"),
    "an incomplete group": (
        edit(1, lambda e: replace(e, used=(Used(5, (0,), (8,)), e.used[1]), num_samples=3, num_tokens=12)),
        r"task 5 was trained without its rollouts \[1\]",
    ),
    "a drop beyond the cursor": (
        edit(2, lambda e: replace(e, drops=(*e.drops, Drop(14, 0, BOTH, "late")))),
        "sequence 14 beyond its cursor 13",
    ),
    "wrong counts": (change(1, num_tokens=99), "num_tokens is 99 in the ledger, the stream has 16"),
    # The ledger's order.
    "a missing version": (lambda f: f.entries.pop(1), "version 0.3 before any version 2"),
    "a late beginning": (lambda f: f.entries.pop(0), "the ledger begins with version 2"),
    "a version twice": (lambda f: f.entries.append(f.entries[2]), "version 0.3 after version 0.3"),
    "a fork that changes the groups": (
        lambda f: f.entries.append(entry(3, f.entries[1].used, (), 13, 10, (1, 0))),
        "other groups than in the epoch before",
    ),
    "a fence that falls": (do(change(0, fence=3), change(1, fence=2), change(2, fence=3)), "fence 2 after fence 3"),
    "a cursor that falls": (change(2, cursor=8), "cursor 8 after cursor 9"),
    "unsorted groups": (edit(1, lambda e: replace(e, used=e.used[::-1], staleness=(0, 1))), r"not sorted by task: \[6, 5\]"),
    "a short batch": (
        edit(1, lambda e: replace(e, used=e.used[:1], staleness=(1,), num_samples=2, num_tokens=8)),
        "expected 2 groups, got 1",
    ),
    # Ages.
    "an age that was made up": (change(2, staleness=(0, 0)), "task 9 is 1 versions old by its spans, 0 by the ledger"),
    "too old": (do(sample(12, rows(9, first=0)), change(2, staleness=(2, 0))), "trained 2 versions old, at most 1"),
    "from the future": (do(sample(13, rows(10, first=2, last=3))), "task 10 has tokens of version 3, trained from version 2"),
    "dropped as stale though it was not": (sample(11, rows(8, first=1)), "task 8 was dropped as stale at an age of 1"),
    # Credits.
    "forgotten retired tasks": (change(2, retired=9, granted=13), "9 tasks retired by the ledger, 10 by its entries"),
    "retired tasks made up": (change(1, retired=9, granted=13), "9 tasks retired by the ledger, 7 by its entries"),
    "a wrong grant": (change(1, granted=12), "12 tasks granted, 7 retired ones allow 11"),
    "granted too much": (key("granted", Grant(20, 3, 10)), "20 tasks were granted; by what has ended at most 14"),
    "issued too much": (key("granted", Grant(12, 3, 8)), "13 tasks were issued, 12 were granted"),
    "grants that fell behind": (key("granted", Grant(10, 2, 6)), "10 tasks are granted, the ledger had granted 11"),
    "never granted": (lambda f: f.keys.pop(0), "no grant was ever given"),
    # Weights.
    "published without an entry": (lambda f: f.manifests.append(manifest(4)), r"version 0.4 was published, but is not in the ledger"),
    "published with other weights": (lambda f: f.manifests.append(manifest(2, "a" * 16)), "version 0.2 was published with digest a{16}"),
    "published before its entry": (
        lambda f: setattr(f, "publish_first", True),
        r"version 0.1 was published 0\.\d+ s before its ledger entry",
    ),
    # Checkpoints, positions, the stream's shape.
    "trimmed above a position": (lambda f: setattr(f, "trim", 10), "positions/main needs sequence 10, the sample stream begins at 11"),
    "trimmed above what a restart trains": (
        lambda f: setattr(f, "trim", 12),
        "a restart from version 2 needs sequence 12, the sample stream begins at 13",
    ),
    "trimmed without a checkpoint": (
        do(lambda f: setattr(f, "trim", 1), lambda f: f.keys.pop(1), lambda f: f.keys.pop(1)),
        "there is no checkpoint",
    ),
    "a position without a checkpoint": (lambda f: f.keys.pop(1), "the position moved to 10 without a checkpoint"),
    "a position put before its checkpoint": (lambda f: f.keys.reverse(), "the position .* moved before the checkpoint"),
    "a position beyond its checkpoint": (
        key("positions/main", Position("main", "samples", 11, Version(0, 2))),
        "moved before the checkpoint",
    ),
    "a position of a later version": (key("positions/main", Position("main", "samples", 10, Version(0, 3))), "moved before the checkpoint"),
    "a position above an older checkpoint": (
        key("latest/main", Latest("main", Version(0, 2), "c", 9, 10, older=(Latest("main", Version(0, 1), "b", 6, 5),))),
        "above what the oldest of 2 kept checkpoints needs",
    ),
    "a checkpoint of nothing": (key("latest/main", Latest("main", Version(0, 4), "c", 13, 10)), "of version 4, the ledger ends at 3"),
    "a checkpoint that has read too little": (
        key("latest/main", Latest("main", Version(0, 2), "c", 8, 8)),
        "has read to 8, its entry to 9",
    ),
    "a checkpoint that needs the future": (
        key("latest/main", Latest("main", Version(0, 2), "c", 9, 15)),
        "needs sequence 15 and has read to 9",
    ),
    "a checkpoint that forgets what is pending": (
        do(
            key("latest/main", Latest("main", Version(0, 1), "c", 9, 10)),
            key("positions/main", Position("main", "samples", 10, Version(0, 1))),
        ),
        "needs nothing before 10, but sequence 8 is trained later",
    ),
    # Poison.
    "poison that was not kept": (lambda f: f.dead.clear(), "sequence 4 was dropped as poison, but is not among the dead letters"),
    # The end.
    "ended too early": (lambda f: setattr(f, "config", replace(f.config, run=replace(f.config.run, steps=4))), "after 3 of 4 steps"),
}


@pytest.mark.parametrize("name", list(BENT))
async def test_a_broken_promise_is_found(name: str, nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    bend, says = BENT[name]
    forged = good_run()
    bend(forged)
    found = await problems(forged, nats_bus, nats_address, run_id)
    assert any(re.search(says, problem) for problem in found), found


async def test_a_greedy_rollout_that_was_trained_is_found(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    forged = good_run()
    forged.config = replace(forged.config, loss=LossConfig(advantage="remax"))
    found = await problems(forged, nats_bus, nats_address, run_id)
    assert sum("greedy rollout 1" in one for one in found) == 6, found


async def test_mask_measures_the_youngest_token(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    forged = good_run()
    forged.config = replace(forged.config, tasks=TasksConfig(batch_tasks=2, num_rollouts=2, max_staleness=1, stale="mask"))
    do(sample(12, rows(9, first=0, last=2)), change(2, staleness=(2, 0)))(forged)
    assert await problems(forged, nats_bus, nats_address, run_id) == []


async def test_a_rollout_that_ended_may_be_missing(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    forged = good_run()
    forged.samples[4] = ("tombstones", encode(Tombstone(task=1, reason="failed", rollout=1, group_size=2)), 1)
    edit(
        0,
        lambda e: replace(
            e, used=(e.used[0], Used(1, (0,), (2,))), drops=(*e.drops, Drop(5, 1, (1,), "failed")), num_samples=3, num_tokens=12
        ),
    )(forged)
    assert await problems(forged, nats_bus, nats_address, run_id) == []


async def test_a_stream_that_drops_old_messages(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    await good_run().put(nats_bus, run_id)
    client = await nats.connect(nats_address.url, user=nats_address.user, password=nats_address.password)
    jetstream = client.jetstream()
    await jetstream.delete_msg(f"{run_id}-samples", 12)
    report = await audit(nats_address.url, nats_address.user, nats_address.password, run_id)
    assert any("1 and 14, the first is 12" in problem for problem in report.problems)
    await client.close()


async def test_the_script(nats_bus: Bus, nats_address: BusAddress, run_id: str) -> None:
    forged = good_run()
    await forged.put(nats_bus, run_id)
    where = ["--url", nats_address.url, "--user", nats_address.user, "--password", nats_address.password, "--run", run_id]

    async def script() -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(AUDIT), *where, cwd="/", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        return process.returncode, output.decode()

    status, output = await script()
    assert status == 0 and "every promise held" in output and "trained: 6" in output
    await nats_bus.publish(f"{run_id}.weights.policy", encode(manifest(9)))
    status, output = await script()
    assert status == 1 and "problem: version 0.9 was published" in output


def test_the_auditor_imports_nothing_of_the_product() -> None:
    for path in (
        AUDIT.parent / name for name in ("audit.py", "answers.py", "books.py", "promises.py", "raw.py", "stream.py", "msgpack.py")
    ):
        for line in path.read_text().splitlines():
            words = line.split()
            assert not (words[:1] in (["import"], ["from"]) and words[1].split(".")[0] in ("streamrl", "msgspec", "numpy")), (
                f"{path.name}: {line}"
            )
