"""Rewards that come by themselves, lost from the middle of the sample stream: no entry of the ledger names one that was applied."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Container
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import UNSET

from streamrl.consumers.training.reader import open_message
from streamrl.core.records import Rewarded
from streamrl.history.record import record
from streamrl.history.record_log import RecordedLog
from streamrl.history.replay import verify
from streamrl.producers.late import LateRewards
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import SAMPLES, Subjects
from tests.support.harness import read_ledger
from tests.support.world.place import Place, place

pytestmark = pytest.mark.whole

END = 24


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
