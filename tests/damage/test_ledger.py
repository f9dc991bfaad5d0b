"""A ledger, or a sample stream, that has lost something: found out at the start, said, and no version is given twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Container
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from streamrl.bus.protocol import Message
from streamrl.consumers.training import loop
from streamrl.consumers.training.gaps import find_gap, versions_made
from streamrl.consumers.training.ledger import open_ledger
from streamrl.consumers.training.reader import open_message
from streamrl.core.records import Rewarded
from streamrl.errors import CannotResume, LogTruncated
from streamrl.history.record import record
from streamrl.history.record_log import RecordedLog
from streamrl.history.replay import Range, ReplayReport, verify
from streamrl.producers.late import LateRewards
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.ledger import Gap, LedgerEntry, Used
from streamrl.schemas.samples import EpochMark, Mark
from streamrl.schemas.subjects import KEY_ACCEPTED_GAP, LEDGER, SAMPLES, WEIGHTS, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from tests.support.harness import read_ledger, services
from tests.support.world.place import Place, place

pytestmark = pytest.mark.whole

END = 24


class Known:
    """Every version that was ever seen, with its digest: none may be given to two sets of parameters."""

    def __init__(self) -> None:
        self.digests: dict[str, set[str]] = {}

    async def look(self, w: Place) -> None:
        for entry in await read_ledger(w.bus, w.config.run.name):
            if entry.gap is UNSET:
                self.digests.setdefault(str(entry.version), set()).add(entry.digest)
        state = await w.bus.state(WEIGHTS)
        for sequence in range(state.first, state.last + 1):
            manifest = decode((await w.bus.fetch(WEIGHTS, sequence)).body, Manifest)
            self.digests.setdefault(str(manifest.version), set()).add(manifest.digest)

    @property
    def twice(self) -> list[str]:
        return [version for version, digests in self.digests.items() if len(digests) > 1]


@asynccontextmanager
async def trained(tmp_path: Path, *, back_to: int | None = None) -> AsyncGenerator[tuple[Place, Known]]:
    """A run of 14 versions whose trainer is down; with `back_to`, its newest checkpoint is that of an earlier version."""
    async with place(tmp_path, trainer={"checkpoint_every": 4, "keep_checkpoints": 100}) as w:
        await w.train(until=14)
        while back_to is not None and int(w.kept[0].name[6:14]) > back_to:
            w.kept[0].rename(w.run.path / w.kept[0].name)
        known = Known()
        await known.look(w)
        yield w, known


async def versions(w: Place) -> list[str]:
    """As the ledger has them, gaps in brackets."""
    entries = await read_ledger(w.bus, w.config.run.name)
    return [str(entry.version) if entry.gap is UNSET else f"[{entry.version}]" for entry in entries]


async def verified(w: Place, span: Range | None = None) -> ReplayReport:
    subjects = Subjects(w.config.run.name)
    made = await versions_made(w.bus, subjects, await w.latest(), trainer="main", run_path=w.run.path)
    return await verify(w.config, w.bus, w.run.model_dir, checkpoints=w.run.checkpoints, span=span, highest=max(made.values()))


async def test_a_lost_end_behind_the_checkpoint_begins_an_epoch_after_all_that_was_made(tmp_path: Path) -> None:
    async with trained(tmp_path) as (w, known):
        last = int((await versions(w))[-1].split(".")[1])
        w.bus.lose(LEDGER, *range(10, last + 1))
        report = await verified(w)
        [lost] = report.lost
        assert not report.ok and f"version 10 to {last}" in lost, report.lines
        assert report.versions == report.equal == 9, "what is there is verified all the same"
        await w.train()
        expected = [f"0.{n}" for n in range(1, 10)] + [f"[1.{last}]"] + [f"1.{n}" for n in range(last + 1, END + 1)]
        assert await versions(w) == expected
        [said] = await w.said()
        assert f"version 10 to {last}" in said and "in epoch 1" in said
        await known.look(w)
        assert known.twice == []
        ledger = await open_ledger(w.bus, Subjects(w.config.run.name), "main")
        assert ledger.forks == (EpochMark(1, last, last),)
        assert not (await verified(w)).ok
        after = await verified(w, Range(first=last))
        assert after.ok and after.versions == END - last, after.lines
        await w.train()
        assert await versions(w) == expected and len(await w.said()) == 1, "it is said once"


async def test_a_lost_end_after_the_checkpoint_is_trained_anew_in_an_epoch_of_its_own(tmp_path: Path) -> None:
    async with trained(tmp_path, back_to=12) as (w, known):
        last = int((await versions(w))[-1].split(".")[1])
        w.bus.lose(LEDGER, *range(14, last + 1))
        await w.train()
        assert await versions(w) == [f"0.{n}" for n in range(1, 14)] + ["[1.13]"] + [f"1.{n}" for n in range(14, END + 1)]
        await known.look(w)
        assert known.twice == []
        gap = next(entry.gap for entry in await read_ledger(w.bus, w.config.run.name) if entry.gap is not UNSET)
        assert (gap.lost, gap.missing, gap.highest) == ("end", ((14, last),), Version(0, last))
        report = await verified(w)
        assert not report.ok and report.equal == END and not report.problem, "from its beginning to its end"
        assert "1.13" in report.lost[0]


@pytest.mark.parametrize(("sequences", "what"), [((5, 6, 9), "middle"), (range(1, 100), "all")])
async def test_more_than_its_end_is_refused_until_somebody_accepts_it(tmp_path: Path, sequences: tuple[int, ...], what: str) -> None:
    async with trained(tmp_path) as (w, known):
        newest = await w.bus.last(f"{w.config.run.name}.ledger.main")
        assert newest is not None
        last = newest.sequence
        w.bus.lose(LEDGER, *(sequence for sequence in sequences if sequence <= last))
        for accepted in (None, b"3"):  # a consent holds for the loss that it was given for
            if accepted:
                await w.bus.kv.put(KEY_ACCEPTED_GAP, accepted)
            with pytest.raises(CannotResume) as caught:
                await w.train()
            assert caught.value.values["lost"] == what
        tail = await w.bus.last(f"{w.config.run.name}.ledger.main")
        await w.bus.kv.put(KEY_ACCEPTED_GAP, str(tail.sequence if tail else 0).encode())
        await w.train()
        assert (await versions(w))[-1] == f"1.{END}"
        await known.look(w)
        assert known.twice == []
        report = await verify(w.config, w.bus, w.run.model_dir, highest=Version(0, last))
        assert not report.ok and report.lost


@pytest.mark.parametrize("known_end", [False, True], ids=["sequences are given again", "the end is known"])
async def test_a_sample_stream_that_lost_its_end_goes_on_from_what_it_still_has(tmp_path: Path, known_end: bool) -> None:
    """The newest checkpoint has read more than there is, and so has the ledger; that the lost tasks end is another matter."""
    async with trained(tmp_path, back_to=8 if known_end else None) as (w, known):
        entries = await read_ledger(w.bus, w.config.run.name)
        state = await w.bus.state(SAMPLES)
        w.bus.lose(SAMPLES, *range(entries[10].cursor, state.last + 1), known_end=known_end)
        report = await verified(w)
        if known_end:
            assert not report.ok and report.problem and report.equal == 10, report.lines
        else:
            assert not report.ok and any("stream ends" in text for text in report.lost), report.lines
        await w.train(until=len(entries) + 1)
        # Producers are up and may have filled the place of version 11's last message, which need not be one of its own groups'.
        assert (await versions(w))[len(entries)] == "[1.10]"
        assert any("sample stream" in text for text in await w.said())
        await known.look(w)
        assert known.twice == []


@pytest.mark.parametrize("restarted", [False, True], ids=["engine stays", "engine is started again"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
async def test_nobody_is_left_with_a_version_that_samples_were_lost_of(tmp_path: Path, max_staleness: int, restarted: bool) -> None:
    """The engine serves the version that was lost, and tasks have been issued that wait for its number."""
    sections: dict[str, dict[str, object]] = {
        "run": {"steps": 18},
        "tasks": {"max_staleness": max_staleness},
        "trainer": {"checkpoint_every": 4, "keep_checkpoints": 100},
    }
    async with place(tmp_path, kinds=("producer", "feeder"), **sections) as w, AsyncExitStack() as first:
        await first.enter_async_context(services(w.config, w.run, w.bus, ["engine"]))
        await w.train(until=14)
        while int(w.kept[0].name[6:14]) > 12:
            w.kept[0].rename(w.run.path / w.kept[0].name)
        known = Known()
        await known.look(w)
        before = await read_ledger(w.bus, w.config.run.name)
        lost = before[12].cursor
        w.bus.lose(SAMPLES, *range(lost, (await w.bus.state(SAMPLES)).last + 1))
        async with AsyncExitStack() as second:
            if restarted:
                await first.aclose()
                await second.enter_async_context(services(w.config, w.run, w.bus, ["engine"]))
            await w.train()
        [gap] = [entry.version.number for entry in await read_ledger(w.bus, w.config.run.name) if entry.gap is not UNSET]
        assert gap < 13
        assert await versions(w) == [*(str(one.version) for one in before), f"[1.{gap}]", *(f"1.{n}" for n in range(gap + 1, 19))]
        await known.look(w)
        assert known.twice == []
        assert known.digests[f"1.{gap}"] == known.digests[f"0.{gap}"], "the epoch's first version is the one that is gone on from"
        after = (await read_ledger(w.bus, w.config.run.name))[len(before) :]
        drops = Counter(drop.reason for entry in after for drop in entry.drops)
        assert drops["lost_version"] <= 2 * (max_staleness + 1) * w.config.tasks.batch_tasks, drops


async def test_a_trainer_whose_stream_loses_its_end_while_it_reads_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In lockstep it would wait for ever: what it waits for was lost, and what comes in its place has sequences that were read before."""
    monkeypatch.setattr(loop, "LOOK_EVERY_S", 0.05)
    often: dict[str, object] = {"checkpoint_every": 1, "keep_checkpoints": 100}
    async with place(tmp_path, run={"steps": 12}, tasks={"max_staleness": 0}, trainer=often) as w:
        training = asyncio.create_task(w.train())
        async with asyncio.timeout(60):
            async for message in w.bus.read(LEDGER, after=0):
                if message.sequence == 6:
                    break
        last = (await w.bus.state(SAMPLES)).last
        w.bus.lose(SAMPLES, *range(last - 2, last + 1))
        with pytest.raises(LogTruncated):
            await training
        await w.train()
        assert (await versions(w))[-1] == "1.12"


async def test_a_hole_that_readers_had_passed_over_is_no_gap_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made after it was made without it."""
    monkeypatch.setattr("streamrl.consumers.training.reaper.LOOK_EVERY_S", 0.5)
    async with trained(tmp_path) as (w, known):
        cursor = (await w.latest()).cursor
        async with asyncio.timeout(60):
            while (await w.bus.state(SAMPLES)).last == cursor:
                await asyncio.sleep(0.01)
        w.bus.lose(SAMPLES, *range(cursor + 1, (await w.bus.state(SAMPLES)).last + 1), known_end=True)
        made = len(await versions(w)) + 2
        await w.train(until=made)
        await known.look(w)
        while int(w.kept[0].name[6:14]) > 8:
            w.kept[0].rename(w.run.path / w.kept[0].name)
        await w.train()
        assert await versions(w) == [f"0.{number}" for number in range(1, END + 1)]
        await known.look(w)
        assert known.twice == [] and (await verified(w)).ok
        read = w.bus.read

        async def slow(stream: str, *, after: int, subject: str | None = None) -> AsyncGenerator[Message]:
            async for message in read(stream, after=after, subject=subject):
                if stream == SAMPLES and message.sequence > after + 1:
                    await asyncio.sleep(0.5)  # at the hole, as a bus does that looks first whether it is one
                after = message.sequence
                yield message

        monkeypatch.setattr(w.bus, "read", slow)
        report = await verified(w)
        assert report.ok and report.equal == END, report.lines


async def test_marks_in_the_place_of_lost_samples_are_not_taken_for_them(tmp_path: Path) -> None:
    """`up` puts one at each start, and it has no task."""
    async with trained(tmp_path, back_to=8) as (w, known):
        entries = await read_ledger(w.bus, w.config.run.name)
        first, end = max(max(group.sequences) for group in entries[-1].used), (await w.bus.state(SAMPLES)).last
        w.bus.lose(SAMPLES, *range(first, end + 1))
        for _ in range(first, end + 1):
            await w.bus.publish(Subjects(w.config.run.name).marks, encode(Mark(name="start")))
        await w.train(until=len(entries) + 1)
        read = [entry.version.number for entry in entries if entry.cursor < first]
        assert (await versions(w))[len(entries)] == f"[1.{max(read)}]", "others had read, dropped or counted what was lost"
        await known.look(w)
        assert known.twice == []


async def test_another_loss_after_a_gap_is_found_too(tmp_path: Path) -> None:
    async with trained(tmp_path) as (w, known):
        last = len(await versions(w))
        w.bus.lose(LEDGER, last)
        await w.train(until=last + 4)
        await known.look(w)
        before = await versions(w)
        state = await w.bus.state(LEDGER)
        w.bus.lose(LEDGER, state.last)
        await w.train()
        after = await versions(w)
        number = before[-1].split(".")[1]
        assert after[: len(before) - 1] == before[:-1] and after[len(before) - 1] == f"[2.{number}]" and after[-1] == f"2.{END}"
        await known.look(w)
        assert known.twice == [] and len(await w.said()) == 2


@pytest.mark.parametrize("opened", [False, True], ids=["nothing came after the gap", "the epoch has versions"])
async def test_a_stream_that_lost_its_end_below_a_gap_leads_back_behind_it(tmp_path: Path, opened: bool) -> None:
    """The ledger lost its end behind a checkpoint, and then the sample stream what that checkpoint had read: only older ones are left."""
    async with trained(tmp_path) as (w, known):
        behind, older = (int(path.name[6:14]) for path in w.kept[:2])
        assert behind > older + 1
        kept = older + 2  # entries: those up to the one after the older checkpoint, and the gap
        entries = await read_ledger(w.bus, w.config.run.name)
        w.bus.lose(LEDGER, *range(kept, len(entries) + 1))
        await w.train(until=kept + 2 * opened)
        await known.look(w)
        before = await versions(w)
        assert before[kept - 1] == f"[1.{behind}]" and len(before) >= kept + 2 * opened
        if not opened:
            w.bus.lose(LEDGER, *range(kept + 1, len(before) + 1))
        kept = len(before) if opened else kept
        for path in w.kept:
            if int(path.name[6:14]) > behind:
                path.rename(w.run.path / path.name)
        w.bus.lose(SAMPLES, *range(entries[behind - 1].cursor, (await w.bus.state(SAMPLES)).last + 1))
        await w.train()
        after = (await versions(w))[kept:]
        back = int(after[0].strip("[]").split(".")[1])
        assert after == [f"[2.{back}]", *(f"2.{n}" for n in range(back + 1, END + 1))] and back in (older, older + 1)
        await known.look(w)
        assert known.twice == []
        report = await verified(w)
        assert report.equal == END and not report.problem and len(report.lost) == 2, report.lines
        ledger = await open_ledger(w.bus, Subjects(w.config.run.name), "main")
        assert [(fork.epoch, fork.first) for fork in ledger.forks] == [(1, behind), (2, back)]
        w.bus.lose(LEDGER, *range(kept + 2, kept + len(after) + 1))
        await w.train()
        [*_, gap] = await read_ledger(w.bus, w.config.run.name)
        assert gap.gap is not UNSET and gap.gap.missing == ((back + 1, END),), "nothing is excused by the gap that was gone back behind"
        await known.look(w)
        assert known.twice == []


def entry(number: int, epoch: int = 0, gap: Gap | None = None) -> LedgerEntry:
    used = () if gap else (Used(number, (0,), (number,)),)
    version = Version(epoch, number)
    return LedgerEntry(
        run="r", trainer="main", version=version, source="", used=used, cursor=10 * number, granted=9, retired=0, gap=gap or UNSET
    )


def line(*numbers: int) -> dict[int, LedgerEntry]:
    return {number: entry(number) for number in numbers}


NOTHING: list[tuple[dict[int, LedgerEntry], int, dict[str, Version]]] = [
    ({}, 0, {}),
    ({}, 0, {"manifest": Version()}),
    (line(1, 2, 3), 0, {"checkpoint": Version(0, 2), "manifest": Version(0, 3)}),
    (line(1, 2, 3), 3, {"checkpoint": Version(0, 3), "manifest": Version(0, 1)}),
    (line(1, 2, 3), 2, {"manifest": Version(0, 2)}),
]


@pytest.mark.parametrize(("entries", "start", "made"), NOTHING)
def test_nothing_is_missing_after_an_ordinary_crash(entries: dict[int, LedgerEntry], start: int, made: dict[str, Version]) -> None:
    assert find_gap(entries, {}, start=start, made=made, readable=99) is None


MISSING = [
    (line(1, 2), 0, {"manifest": Version(0, 3)}, 99, 2, "end", ((3, 3),), "manifest"),
    (line(1, 2), 4, {"checkpoint": Version(0, 4)}, 99, 4, "end", ((3, 4),), "checkpoint"),
    (line(1, 2, 4), 2, {}, 99, 2, "middle", ((3, 3),), "ledger"),
    (line(3, 4), 4, {}, 99, 4, "middle", ((1, 2),), "ledger"),
    ({}, 2, {"checkpoint": Version(0, 2)}, 99, 2, "all", ((1, 2),), "checkpoint"),
    ({}, 0, {"manifest": Version(2, 7)}, 99, 0, "all", ((1, 7),), "manifest"),
    (line(1, 2, 3), 1, {"manifest": Version(0, 3)}, 25, 2, "samples", (), "ledger"),
]


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_named(case: Any) -> None:
    entries, start, made, readable, last, lost, missing, known_by = case
    found = find_gap(entries, {}, start=start, made=made, readable=readable)
    assert found is not None
    assert (found[0], found[1].lost, found[1].missing, found[1].known_by) == (last, lost, missing, known_by)


def test_what_was_accepted_is_not_missing_again() -> None:
    gap = Gap(lost="end", missing=((3, 6),), highest=Version(0, 6), known_by="manifest")
    gaps = {1: entry(4, 1, gap)}
    entries = line(1, 2) | {5: entry(5, 1)}
    assert find_gap(entries, gaps, start=5, made={"manifest": Version(0, 6)}, readable=99) is None
    again = find_gap(entries, gaps, start=5, made={"manifest": Version(1, 6)}, readable=99)
    assert again is not None and again[1].missing == ((6, 6),)


@asynccontextmanager
async def judged(tmp_path: Path, *, checkpoint: int = 8) -> AsyncGenerator[Place]:
    """A run of 14 versions whose trainer is down and whose newest checkpoint is an earlier one; rewards go on coming."""
    async with place(tmp_path, trainer={"checkpoint_every": 4, "keep_checkpoints": 100}, reward={"kind": "late"}) as w:
        rewards = LateRewards(w.bus, Subjects(w.config.run.name))

        async def judge() -> None:
            async for _, sample in rewards.unrewarded():
                await rewards.publish(sample.task, sample.rollout, float(sample.rollout))

        judging = asyncio.create_task(judge())
        try:
            await w.train(until=14)
            while int(w.kept[0].name[6:14]) > checkpoint:
                w.kept[0].rename(w.run.path / w.kept[0].name)
            yield w
        finally:
            judging.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await judging


async def rewards_between(w: Place, first: int, last: int, tasks: Container[int] | None = None) -> list[int]:
    """Sequences of rewards that no entry is closed at; of these tasks, where they are given."""
    closed = {entry.cursor for entry in await read_ledger(w.bus, w.config.run.name)}
    found = [open_message(await w.bus.fetch(SAMPLES, sequence)).record for sequence in range(first + 1, last)]
    rewards = [one for one in found if isinstance(one, Rewarded) and one.sequence not in closed]
    return [one.sequence for one in rewards if tasks is None or one.task in tasks]


def at(entries: list[LedgerEntry], number: int) -> LedgerEntry:
    return next(entry for entry in entries if entry.version.number == number)


async def used_between(w: Place, entries: list[LedgerEntry]) -> tuple[int, list[int]]:
    """The first version from 8 on whose next one was made of rewards between the two, and their sequences.

    A reward of a group that is in no batch yet, or was dropped, changes nothing that was made.
    """
    for number in range(8, entries[-1].version.number):
        first, after = at(entries, number), at(entries, number + 1)
        found = await rewards_between(w, first.cursor, after.cursor, {group.task for group in after.used})
        if found:
            return number, found
    raise AssertionError("every batch is of rewards that came before the batch before it")


@pytest.mark.parametrize("many", [False, True], ids=["one", "all between two batches"])
async def test_a_lost_reward_that_closed_no_batch_is_a_gap_and_is_named(tmp_path: Path, many: bool) -> None:
    async with judged(tmp_path) as w:
        before = await read_ledger(w.bus, w.config.run.name)
        made = before[-1].version.number
        whole, lost = await used_between(w, before)
        lost = await rewards_between(w, at(before, whole).cursor, at(before, whole + 1).cursor) if many else lost[:1]
        w.bus.lose(SAMPLES, *lost)

        report = await verify(w.config, w.bus, w.run.model_dir)
        assert not report.ok and report.equal == whole, report.lines
        [said] = report.lost
        assert f"lost message {lost[0]}" in said and f"version {at(before, whole + 1).version}" in said, report.lines
        await record(w.bus, w.config, w.run, tmp_path / "recording", run_record=None)
        again = RecordedLog(tmp_path / "recording")
        assert (await verify(again.config, again, again.model_dir)).lost == report.lost

        await w.train()
        entries = await read_ledger(w.bus, w.config.run.name)
        [gap] = [entry for entry in entries if entry.gap is not UNSET]
        assert gap.gap is not UNSET and (gap.gap.lost, gap.gap.highest.number) == ("samples", made)
        assert (gap.version.epoch, gap.version.number) == (1, whole)
        assert [str(entry.version) for entry in entries[made + 1 :]] == [f"1.{number}" for number in range(whole + 1, END + 1)]
        assert any("lost messages" in text for text in await w.said())
        after = await verify(w.config, w.bus, w.run.model_dir)
        assert after.equal == END and not after.problem and len(after.lost) == 1, after.lines


async def test_a_reward_that_was_lost_before_it_was_read_is_no_gap(tmp_path: Path) -> None:
    """What was made without it is not made anew; its group waits, and the run goes on."""
    async with judged(tmp_path, checkpoint=12) as w:
        cursor = (await w.latest()).cursor
        made = await read_ledger(w.bus, w.config.run.name)
        end = (await w.bus.state(SAMPLES)).last
        unread = await rewards_between(w, max(cursor, made[-1].cursor), end)
        w.bus.lose(SAMPLES, *unread[:1])
        await w.train()
        entries = await read_ledger(w.bus, w.config.run.name)
        assert [str(entry.version) for entry in entries] == [f"0.{number}" for number in range(1, END + 1)]
        report = await verify(w.config, w.bus, w.run.model_dir)
        assert report.ok, report.lines
