"""A branch on the page: rows of its own ledger, samples of its parent's stream."""

import asyncio
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.config.tree import Config, RunConfig
from streamrl.errors import SchemaError
from streamrl.history.branch_file import LEDGER_FILE, BranchFile, read_branch_file
from streamrl.monitor.series import BATCH
from streamrl.page.attention import Attention
from streamrl.page.index import LEDGER_TABLE, TOKENS, Index, open_index
from streamrl.page.others import Others
from streamrl.page.samples import Samples
from streamrl.page.search import Wanted
from streamrl.page.serving import log_of
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from streamrl.schemas.ledger import LedgerEntry, Used
from streamrl.telemetry.names import PARENT_DISTANCE
from tests.page.conftest import batches, indexed, page, read, write
from tests.page.test_index import ReadLog, samples
from tests.page.test_server import status, told
from tests.support.ledgers import entry


def entries(first: int, last: int, **fields: Any) -> list[LedgerEntry]:
    """Versions of a branch, of which the first two are of the warm-up."""
    metrics = {"train/loss": 2.0, "rollout/tokens_trained": 10.0}
    learned = metrics | {"rollout/raw_reward": 0.25, PARENT_DISTANCE: 0.125}
    kind = {"digest": f"{1:016x}", "num_tokens": 30, **fields}
    return [
        entry(number, source="warmup" if number < 3 else "main", metrics=metrics if number < 3 else learned, time_s=1e9 + number, **kind)
        for number in range(first, last + 1)
    ]


def append(run: RunDir, more: Iterable[LedgerEntry]) -> None:
    with (run.path / LEDGER_FILE).open("ab") as file:
        file.writelines(msgspec.json.encode(one) + b"\n" for one in more)


def branched(parent: RunDir, last: int, name: str = "twig", **fields: Any) -> RunDir:
    """A branch beside its parent, of versions up to `last`, as `streamrl replay --set` leaves one that it has not ended."""
    run = RunDir(parent.path.parent / name)
    run.path.mkdir()
    run.write_config(Config(run=RunConfig(name=name, dir=str(run.path.parent))))
    note = BranchFile(
        branch=name, parent=parent.name, parent_version="0.0", overrides=("loss.clip_low=0.1",), same_batches=True, created_s=1e9
    )
    (run.path / BRANCH_FILE).write_bytes(msgspec.json.encode(note))
    append(run, entries(1, last, **fields))
    return run


def steps(index: Index) -> list[float]:
    return index.columns(BATCH, ["step"])["step"].tolist()


async def test_its_rows_are_those_of_its_ledger_and_grow_with_it(run: RunDir) -> None:
    twig = branched(run, 4)
    with (twig.path / LEDGER_FILE).open("ab") as file:
        file.write(b'{"torn')
    with indexed(twig) as index:
        assert (steps(index), index.rows(LEDGER_TABLE)) == ([0, 0, 1, 2], 4)
        assert index.series(BATCH, [PARENT_DISTANCE], x=TOKENS).values == {PARENT_DISTANCE: [None, None, 0.125, 0.125]}
        assert index.progress().done == index.progress().total - len(b'{"torn')
    (twig.path / LEDGER_FILE).write_bytes((twig.path / LEDGER_FILE).read_bytes().removesuffix(b'{"torn') + b"no entry\n")
    append(twig, entries(5, 6))
    with indexed(twig) as index:
        assert (steps(index), index.newest["rollout/raw_reward"]) == ([0, 0, 1, 2, 3, 4], 0.25)
        append(twig, entries(7, 7))
        read(index)
        assert steps(index)[-1] == 5
    (twig.path / LEDGER_FILE).unlink()
    append(twig, entries(1, 3))  # trained anew under the same name
    with indexed(twig) as index:
        assert steps(index) == [0, 0, 1]


async def test_it_says_what_it_is_and_nothing_of_a_run_that_it_never_was(run: RunDir) -> None:
    twig = branched(run, 5)
    async with page(twig) as (base, _, client):
        found = await told(client, f"{base}/api/run")
        assert (found["branch"]["parent"], found["branch"]["here"], found["step"], found["version"]) == ("demo", True, 3, "0.5")
        assert (found["glance"], found["worst"], found["objectives"]["lines"]) == ({}, {}, [])
        assert await told(client, f"{base}/api/letters") == []
        assert found["state"] == "interrupted"
        with lock_run(twig):
            assert (await told(client, f"{base}/api/run"))["state"] == "running"
        shutil.rmtree(run.path)
        assert await status(client, f"{base}/api/batches/3") == 404, "its parent has the samples"
        assert not (await told(client, f"{base}/api/run"))["branch"]["here"]


def test_its_parent_is_a_run_beside_it(run: RunDir) -> None:
    twig = branched(run, 1)
    path = twig.path / BRANCH_FILE
    path.write_bytes(path.read_bytes().replace(b'"demo"', b'"../demo"'))
    with pytest.raises(SchemaError):
        read_branch_file(twig.path)


async def test_a_parent_of_another_version_does_not_end_its_page(run: RunDir) -> None:
    twig = branched(run, 3)
    run.config_path.write_text('{"run": {"name": "demo", "warp": 9}}')
    with indexed(twig) as index:
        following = asyncio.create_task(log_of(twig, index, twig.load_config(), Attention()).follow())
        done, _ = await asyncio.wait([following], timeout=0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert not done


async def test_it_is_compared_by_either_page_and_its_ledger_is_no_link(run: RunDir, tmp_path: Path) -> None:
    write(run, batches(1, 5))
    twig = branched(run, 5)
    with indexed(run) as index:
        others = Others(run, run.load_config(), index)
        assert others.names() == ["twig"]
        demo, branch = (await others.compare(["twig"], "version")).runs
        assert (demo.parent, branch.parent, branch.batches) == ("", "demo", 5)
        assert (branch.last["parent_distance"], demo.last["parent_distance"]) == (0.125, None)
    with indexed(twig) as index:
        others = Others(twig, twig.load_config(), index)
        assert [one.parent for one in (await others.compare(["demo"], "version")).runs] == ["demo", ""]
        os.mkfifo(run.path / BRANCH_FILE)
        assert others.names() == []
        (run.path / BRANCH_FILE).unlink()
    (twig.path / LEDGER_FILE).rename(tmp_path / "elsewhere")
    (twig.path / LEDGER_FILE).symlink_to(tmp_path / "elsewhere")
    with indexed(run) as index:
        assert Others(run, run.load_config(), index).names() == []


async def test_its_samples_are_fetched_from_its_parents_stream(run: RunDir) -> None:
    async with samples(run) as (some, bus):
        theirs = await some.batch(3)
        used: dict[int, dict[int, int]] = {}
        for one in theirs.samples:
            used.setdefault(one.task, {})[one.rollout] = one.sequence
        groups = tuple(Used(task, tuple(of), tuple(of.values())) for task, of in used.items())
        twig = branched(run, 2)
        append(twig, [replace(one, used=groups) for one in entries(3, 3)])
        with open_index(twig) as index:
            read(index)
            log = ReadLog(run, index, "main", Attention())
            log.there = bus
            mine = Samples(twig, twig.load_config(), index, log)
            batch = await mine.batch(3)
            assert [(one.task, one.rollout, one.reward) for one in batch.samples] == [
                (one.task, one.rollout, one.reward) for one in theirs.samples
            ]
            found = await mine.search(Wanted(), upto=None, batches=9)
            assert (len(found.samples), found.first, found.missing) == (4, 1, 0)
            [first, _] = (await mine.group(3, 31)).samples
            assert (first["prompt"] != "", first["advantage"]) == (True, None), "its tokenizer is its parent's"
            assert (await mine.drops(), await mine.letters()) == ([], [])
