"""`streamrl trace RUN TASK`: what it finds of a task is what the whole log has of it, on runs of an earlier build and on one of today."""

import json
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Message
from streamrl.bus.reading import stretch
from streamrl.errors import ConfigError
from streamrl.history.record_log import RecordedLog
from streamrl.history.search import TaskFinder, ends, first_entry, names
from streamrl.history.trace import WIDTH, Claimed, Life, life_of, life_text, with_deliveries
from streamrl.history.trace_window import WindowReader
from streamrl.producers.protocol import Claim
from streamrl.producers.publishing import Publisher
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.columns import FORMER_NAME
from streamrl.schemas.control import WorkerPresence
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.events import MetricReport
from streamrl.schemas.ledger import Drop, Gap, LedgerEntry, Used
from streamrl.schemas.samples import RewardUpdate, Sample, Tombstone
from streamrl.schemas.subjects import HEADER_SCHEMA, LEDGER, SAMPLES, Subjects, kind_of
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version
from tests.support import recorded as runs
from tests.support.ledgers import entry
from tests.support.printed import Printed, printed
from tests.support.recorded_run import Recorded

NAMES = ("drop", "fork", "late", "lockstep", "wait", "warmup")
"""Recordings of 7fe21ef."""


async def whole_log(log: RecordedLog, subject: str) -> tuple[list[LedgerEntry], list[Message]]:
    """All entries and all messages, read from the beginning."""
    newest = await log.last(subject)
    ledger, samples = await log.state(LEDGER), await log.state(SAMPLES)
    messages = stretch(log, LEDGER, first=ledger.first, last=newest.sequence if newest else 0, subject=subject)
    entries = [decode(message.body, LedgerEntry) async for message in messages]
    return entries, [message async for message in stretch(log, SAMPLES, first=samples.first, last=samples.last)]


def is_of(message: Message, task: int) -> bool:
    return message.headers.get("Streamrl-Task") == str(task)


async def check_every_task(log: RecordedLog, *, step: int = 1) -> list[Life]:
    """Each task of a recording, or each `step`-th one, is found as the whole log has it; returns their lives."""
    config = log.config
    subjects, trainer = Subjects(config.run.name), config.trainer.name
    entries, messages = await whole_log(log, subjects.ledger(trainer))
    lives: list[Life] = []
    for task in range(0, entries[-1].granted, step):
        found = await TaskFinder(log, None, subjects, trainer).find(task)
        assert [entry.version for entry in found.entries] == [entry.version for entry in entries if names(entry, task)]
        ending = [entry for entry in entries if ends(entry, task)]
        assert (found.end is None) == (not ending)
        assert not ending or (found.end is not None and found.end.version == ending[-1].version)
        assert {message.sequence for message in messages if is_of(message, task)} == {message.sequence for message in found.messages}
        life = life_of(found, config.run.name, group_size=config.tasks.num_rollouts)
        check_life(life, ending[-1] if ending else None, {message.sequence: message for message in messages})
        lives.append(life)
    return lives


def check_life(life: Life, end: LedgerEntry | None, messages: dict[int, Message]) -> None:
    """What it says of tokens, versions and ages is what message and entry have; and it fits a terminal."""
    used = next((group for group in end.used if group.task == life.task), None) if end is not None else None
    assert life.state == ("trained" if used is not None else "dropped" if end is not None else "open")
    if used is not None and end is not None:
        trained = {rollout.rollout: rollout.sequence for rollout in life.rollouts if rollout.state == "trained"}
        assert trained == dict(zip(used.rollouts, used.sequences, strict=True))
        ages = [
            part.age
            for rollout in life.rollouts
            if rollout.state == "trained"
            for one in rollout.samples
            for t in one.turns
            for part in t.versions
        ]
        oldest = end.staleness[end.used.index(used)] if end.staleness else 0
        assert max((age for age in ages if age is not None), default=0) == oldest
    for rollout in life.rollouts:
        if rollout.sequence is not None and kind_of(messages[rollout.sequence].subject) == "samples":
            rows = [row for row in decode_samples(messages[rollout.sequence].body).rows() if row.rollout == rollout.rollout]
            for row, one in zip(sorted(rows, key=lambda row: row.sample), rollout.samples, strict=True):
                sampled = [(str(span.version), span.length) for span in row.spans if span.version is not None]
                told: list[tuple[str, int]] = [(part.version, part.tokens) for turn in one.turns for part in turn.versions]
                assert told == sampled and (one.tokens, one.reward) == (len(row.tokens), reward_of(row, end, messages))
    text = life_text(life)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.startswith(f"task {life.task} of run {life.run}")


def reward_of(row: Sample, end: LedgerEntry | None, messages: dict[int, Message]) -> float | None:
    """That of the highest revision up to the place of the log where its task ended; revision 0 is the sample's own."""
    last = max(messages) if end is None else end.cursor
    bodies = [message.body for place, message in sorted(messages.items()) if kind_of(message.subject) == "rewards" and place <= last]
    updates = [one for one in (decode(body, RewardUpdate) for body in bodies) if (one.task, one.rollout) == (row.task, row.rollout)]
    return max({0: row.reward, **{one.revision: one.reward for one in reversed(updates)}}.items())[1]


@pytest.mark.parametrize("name", NAMES)
async def test_every_task_of_a_run_of_an_earlier_build(name: str, tmp_path: Path) -> None:
    runs.unpack(name, tmp_path)
    log = RecordedLog(tmp_path / runs.RECORDING)
    lives = await check_every_task(log, step=5)
    assert {life.state for life in lives} >= {"trained"}
    # What that build did not record is said to be missing, and no time is made up.
    claimed = [life for life in lives if life.claim is not None]
    assert claimed and all(life.claim is not None and life.claim.claimed_s is None for life in claimed)
    assert all("not recorded" in life_text(life) for life in claimed)


async def test_every_task_of_a_run_of_today(recorded: Recorded) -> None:
    lives = await check_every_task(RecordedLog(recorded.path), step=12)
    trained = [life for life in lives if life.state == "trained" and life.source == "main"]
    assert trained
    for life in trained:
        assert life.claim is not None and life.claim.producer == "producer-0" and life.ended_s is not None
        for rollout in life.rollouts:
            stored_s = next(one.stored_s for one in life.messages if one.sequence == rollout.sequence)
            for one in rollout.samples:
                [turn] = one.turns
                times = [
                    *(life.claim.issued_s, life.claim.claimed_s, turn.asked_s, turn.began_s, turn.finished_s, one.scored_s, stored_s),
                    life.ended_s,
                ]
                assert None not in times
                known = [time_s for time_s in times if time_s is not None]
                assert known == sorted(known)
        assert "not recorded" not in life_text(life)
    # Demonstrations of the warm-up have neither versions nor turns.
    assert any(one.demonstration and not one.turns for life in lives for rollout in life.rollouts for one in rollout.samples)


@pytest.mark.nats
def test_the_store_of_a_run_of_an_earlier_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is over, so that its server is started; what it says is what its recording says."""
    runs.unpack("drop", tmp_path)
    said: list[str] = []
    for where in ("drop", str(tmp_path / runs.RECORDING)):
        life = json.loads(printed(capsys, "trace", where, "7", "--json", "--dir", str(tmp_path / "runs")).out)
        said.append(json.dumps({key: value for key, value in life.items() if key != "messages"}))
        assert [one["sequence"] for one in life["messages"]]
    assert said[0] == said[1]


SUBJECTS = Subjects("made")
TASK = RolloutTask(run="made", index=4, source="main", prompt_ids=(1,), num_rollouts=2)


async def made(*entries: LedgerEntry, issued: int = 6) -> MemoryBus:
    """A run with so many tasks and these entries."""
    bus = MemoryBus("made")
    for index in range(issued):
        await bus.publish(SUBJECTS.tasks("main"), encode(msgspec.structs.replace(TASK, index=index)))
    await store(bus, *entries)
    return bus


async def store(bus: MemoryBus, *entries: LedgerEntry, trainer: str = "main") -> None:
    for one in entries:
        await bus.publish(SUBJECTS.ledger(trainer), encode(one))


async def trace(bus: MemoryBus, task: int = 4, rollout: int | None = None) -> Life:
    found = await TaskFinder(bus, bus, SUBJECTS, "main").find(task)
    return life_of(found, "made", group_size=2, rollout=rollout)


async def test_where_a_task_stands_that_has_not_ended() -> None:
    bus = await made()
    assert "waits for a producer" in (await trace(bus)).detail
    worker = WorkerPresence(worker="producer-7", kind="producer", detail={"tasks": [3, 4]})
    await bus.kv.put("presence/workers/producer-7", encode(worker))
    assert "of producer-7" in (await trace(bus)).detail
    stone = Tombstone(task=4, reason="timeout", rollout=1, group_size=2, detail="30 s of user code", source="main")
    await bus.publish(SUBJECTS.tombstones("main"), encode(stone), headers={"Streamrl-Task": "4"})
    life = await trace(bus)
    assert life.detail.startswith("stored; ")
    assert [(one.state, one.why) for one in life.rollouts] == [("open", ""), ("ended", f"timeout: {stone.detail}")]
    await store(bus, entry())
    detail = (await trace(bus)).detail
    assert "1 of its 2 rollouts" in detail and "producer-7" in detail
    assert [one.rollout for one in (await trace(bus, rollout=1)).rollouts] == [1]
    bus = await made()
    for lease in await bus.claim("main", max=6, wait_s=1.0):
        await lease.done()
    assert "stored nothing" in (await trace(bus)).detail


async def test_a_report_that_cannot_be_read_hides_no_other_delivery() -> None:
    bus = await made()
    now = time.time()
    for worker, body in (
        ("producer-0", encode(MetricReport(worker="producer-0", time_s=now, tasks=(4,)))),
        ("producer-1", b"no report"),
        ("producer-2", encode(MetricReport(worker="producer-2", time_s=now, tasks=(3, 4)))),
    ):
        await bus.publish(SUBJECTS.metrics(worker), body)
    claim = Claimed(issued_s=now - 5.0, producer="producer-3", claimed_s=now + 5.0, deliveries=3)
    life = await with_deliveries(msgspec.structs.replace(await trace(bus), claim=claim), bus)
    assert life.claim is not None
    assert [one.producer for one in life.claim.earlier] == ["producer-0", "producer-2"]


@pytest.mark.parametrize("reason", ["failed", "expired", "lost", "stale", "zero_variance"])
async def test_why_a_task_was_not_trained(reason: str) -> None:
    """Whole tasks: by a tombstone with its claim, and without any message, as what expired has none."""
    publisher_bus = await made()
    publisher = Publisher(publisher_bus, SUBJECTS, producer="producer-3")
    await publisher.end_task(4, "main", reason, "because", group_size=2, claim=Claim(deliveries=3, issued_s=1e9, claimed_s=1e9 + 1))
    drops = (Drop(1, 4, (0, 1), reason, "because", retires=True),)
    await store(publisher_bus, entry(drops=drops))
    life = await trace(publisher_bus)
    assert (life.state, life.detail) == ("dropped", f"dropped before version 0.1: {reason}: because")
    assert life.claim is not None and (life.claim.producer, life.claim.deliveries, life.claim.claimed_s) == ("producer-3", 3, 1e9 + 1)
    assert {one.state for one in life.rollouts} == {"dropped"} and all(reason in one.why for one in life.rollouts)
    assert "delivery 3" in life_text(life)
    without = await made(entry(cursor=0, drops=(Drop(0, 4, (), reason, retires=True),)))
    life = await trace(without)
    assert (life.state, life.detail, life.messages) == ("dropped", f"dropped before version 0.1: {reason}", ())


async def test_a_poisoned_message_is_shown_with_its_reason() -> None:
    bus = await made()
    await bus.publish(SUBJECTS.samples("main"), b"no Arrow data", headers={"Streamrl-Task": "4", HEADER_SCHEMA: FORMER_NAME})
    drops = (Drop(1, 4, (), "poison", "expected an Arrow stream", retires=True),)
    await store(bus, entry(drops=drops))
    life = await trace(bus)
    assert life.state == "dropped" and "an Arrow stream" in life.messages[0].detail
    assert life.messages[0].drops == (f"poison: {drops[0].detail} (before version 0.1)",)
    # A message of another task that names none in its headers is nobody's.
    await bus.publish(SUBJECTS.samples("main"), b"\\x00" * 64)
    assert len((await trace(bus)).messages) == 1


async def test_what_was_trimmed_is_said_and_the_ledger_still_tells() -> None:
    used = (Used(4, (0, 1), (1, 1)),)
    bus = await made()
    for task in ("4", "5"):
        await bus.publish(SUBJECTS.rewards, b"x", headers={"Streamrl-Task": task})
    await store(bus, entry(used=used))
    await bus.trim(SAMPLES, through=1)
    life = await trace(bus)
    assert (life.state, life.version, life.messages) == ("trained", "0.1", ())
    assert "begins at message 2" in life.notes[0]
    await bus.trim(SAMPLES, through=2)
    assert "begins at message 3" in (await trace(bus)).notes[0]


async def test_an_entry_between_those_of_a_tap_is_found() -> None:
    """The tap's entries lie in the same stream, and are not the trainer's."""
    bus = MemoryBus("made")
    for number in range(1, 40):
        await store(bus, entry(number, granted=number + 3, used=(Used(number + 1, (0,), (1,)),)))
        await store(bus, *[entry(number, granted=999)] * (number % 3), trainer="tap")
    for task in range(2, 41):
        found = await TaskFinder(bus, None, SUBJECTS, "main").find(task)
        assert found.end is not None and found.end.version.number == task - 1
        assert found.credit is None if task < 4 else found.credit is not None and found.credit.granted == task


class CountedFetches(MemoryBus):
    """Counts what is fetched one by one."""

    num = 0

    async def fetch(self, stream: str, sequence: int) -> Message:
        self.num += 1
        return await super().fetch(stream, sequence)

    async def first_from(self, stream: str, sequence: int, *, subject: str | None = None) -> Message | None:
        self.num += 1
        return await super().first_from(stream, sequence, subject=subject)


async def test_the_ledger_of_a_tap_that_began_late_is_not_looked_for_where_it_cannot_be() -> None:
    bus = CountedFetches("made")
    await store(bus, *(entry(number, granted=number + 3) for number in range(1, 501)))
    await store(bus, *(entry(number, granted=number + 3) for number in range(1, 9)), trainer="tap")
    for granted in range(3, 13):
        bus.num = 0
        begin, below = await first_entry(bus, SUBJECTS.ledger("tap"), 508, lambda one, most=granted: one.granted > most)
        assert begin == min(509, 501 + max(0, granted - 3))
        assert (None if below is None else below.granted) == (None if granted == 3 else min(11, granted))
        assert bus.num < 20


class CountedEntries(MemoryBus):
    """Counts entries of the ledger that are read one behind the other."""

    num = 0

    async def read(self, stream: str, *, after: int, subject: str | None = None) -> AsyncGenerator[Message]:
        async for message in super().read(stream, after=after, subject=subject):
            self.num += stream == LEDGER
            yield message


async def test_after_restarts_with_other_digits_the_ledger_is_not_read_from_its_beginning() -> None:
    """Epoch 0 has the versions 1 to 500, epoch 1 those from 401 to 900, and epoch 2 those from 701 on."""
    bus = CountedEntries("made")
    for epoch, first, last in ((0, 1, 500), (1, 401, 900), (2, 701, 1200)):
        for number in range(first, last + 1):
            await store(bus, entry(number, epoch=epoch, granted=number + 3, used=(Used(number, (0,), (1,)),)))
    for task, versions in ((5, ["0.5"]), (450, ["0.450", "1.450"]), (800, ["1.800", "2.800"]), (1190, ["2.1190"])):
        bus.num = 0
        found = await TaskFinder(bus, None, SUBJECTS, "main").find(task)
        assert [str(one.version) for one in found.entries] == versions
        assert found.end is not None and str(found.end.version) == versions[-1]
        assert found.credit is not None and found.credit.granted == task
        assert bus.num < 150, "some behind its end in each epoch"
    bus.num = 0
    window = await WindowReader(bus, SUBJECTS, "main").entries(399, 410)
    assert [str(one.version) for one in window] == ["0.399", "0.400", *(f"1.{number}" for number in range(401, 411))]
    assert bus.num < 50
    lost = Gap(lost="end", missing=((1190, 1200),), highest=Version(2, 1200), known_by="manifest")
    await store(bus, entry(1195, epoch=3, granted=1198, gap=lost), entry(1196, epoch=3, cursor=1300, granted=1199))
    window = await WindowReader(bus, SUBJECTS, "main").entries(1194, 1196)
    assert [str(one.version) for one in window] == ["2.1194", "2.1195", "3.1196"]


async def test_a_task_that_was_issued_before_a_gap_of_the_ledger() -> None:
    """Its samples lie before the cursors of the entries that would have granted it."""
    bus = await made(issued=20)
    for index in range(1, 9):
        await bus.publish(SUBJECTS.rewards, b"x", headers={"Streamrl-Task": "15" if index == 3 else "0"})
    lost = Gap(lost="end", missing=((2, 3),), highest=Version(0, 3), known_by="manifest")
    for number, cursor, granted, task in ((1, 1, 10, 0), (2, 6, 12, 1), (3, 7, 14, 2), (4, 8, 18, 15)):
        await store(bus, entry(number, epoch=int(number > 1), cursor=cursor, granted=granted, used=(Used(task, (0,), (3,)),)))
        if number == 1:
            await store(bus, entry(1, epoch=1, granted=10, gap=lost))
    life = await trace(bus, 15)
    assert (life.state, life.version, [one.sequence for one in life.messages]) == ("trained", "1.4", [3])
    assert "not known" in life.credit


async def test_what_user_code_says_moves_no_cursor_and_unissued_tasks_are_refused() -> None:
    bus = await made()
    stone = Tombstone(task=4, reason="failed", group_size=2, detail="\x1b[2J\nValueError", source="main")
    await bus.publish(SUBJECTS.tombstones("main"), encode(stone), headers={"Streamrl-Task": "4"})
    text = life_text(await trace(bus))
    assert "\x1b" not in text and "\\x1b[2J" in text
    bus = await made(issued=3)
    for task in (3, 10**17):
        with pytest.raises(ConfigError, match=f"got {task}"):
            await TaskFinder(bus, bus, SUBJECTS, "main").check_issued(task)
    with pytest.raises(ConfigError, match="none has been issued"):
        await TaskFinder(MemoryBus("made"), None, SUBJECTS, "main").check_issued(0)


Say = Callable[..., Printed]
VERB = "trace"


def test_the_verb(said: Say, recorded: Recorded) -> None:
    out, err = said(recorded.path, "41")
    assert err == "" and out.startswith("task 41 of run parent ")
    life = json.loads(said(recorded.path, "41/2", "--json").out)
    assert (life["task"], [one["rollout"] for one in life["rollouts"]]) == (41, [2])


@pytest.mark.parametrize("place", ["", "x", "1/", "/1", "1/2/3", "1.5", "²", "1 2", "9" * 40, "0x1"])
def test_garbage_is_refused_with_what_was_expected(said: Say, recorded: Recorded, place: str) -> None:
    out, err = said(recorded.path, place, code=1)
    assert out == "" and "TASK/ROLLOUT" in err and "hint:" in err


def test_rollouts_runs_taps_and_branches_that_cannot_be_traced(said: Say, tmp_path: Path, recorded: Recorded) -> None:
    assert "of task 41, got 3" in said(recorded.path, "41/3", code=1).err
    err = said("nothing", "1", "--dir", tmp_path, code=1).err
    assert err.startswith("error: ")
    assert "'nobody'" in said(f"{recorded.path}:nobody", "3", code=1).err
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    (tmp_path / "b" / "branch.json").write_text("{}")
    err = said("b", "1", "--dir", tmp_path, code=1).err
    assert "branch 'b'" in err and "branch.json" in err
