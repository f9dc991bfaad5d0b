"""Taps and branches of a run that has lost versions: a gap whose beginning is there is passed; across another nothing leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import UNSET, UnsetType

from streamrl.bus.memory import MemoryBus
from streamrl.core.state import Epoch, FoldState
from streamrl.errors import CheckpointDamaged, ConfigError
from streamrl.history.branch import read_branch_ledger
from streamrl.history.branch_run import train_branch
from streamrl.history.differences import config_differences
from streamrl.history.replay import Range
from streamrl.history.source import Source, read_config
from streamrl.history.tap import AHEAD, FollowedLedger, TapSettings, tap
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import encode
from streamrl.schemas.ledger import Gap, LedgerEntry
from streamrl.schemas.subjects import LEDGER, Subjects
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.harness import read_ledger
from tests.support.world.place import Place, place

END = 24
LOST = Gap(lost="end", missing=((3, 5),), highest=Version(0, 5), known_by="manifest")
ELSEWHERE = "trainer.optimizer.learning_rate=0.02"


@asynccontextmanager
async def with_a_gap(tmp_path: Path) -> AsyncGenerator[tuple[Place, int]]:
    """A finished run that has lost entries on its way, and the number of the version that it went on from."""
    async with place(tmp_path, trainer={"checkpoint_every": 4, "keep_checkpoints": 100}, data={"max_prompt_tokens": 16}) as w:
        await w.train(until=14)
        w.bus.lose(LEDGER, *range(10, (await w.bus.state(LEDGER)).last + 1))
        await w.train()
        [gap] = [entry for entry in await read_ledger(w.bus, w.config.run.name) if entry.gap is not UNSET]
        yield w, gap.version.number


async def tapped(w: Place, name: str, first: int = 0) -> list[LedgerEntry]:
    worker = Worker(config=w.config, run_dir=w.run, bus=w.bus, kind="trainer", index=1)
    await tap(worker, TapSettings(name=name, first=first, overrides=(ELSEWHERE,)))
    return await read_ledger(w.bus, w.config.run.name, name)


def source(w: Place) -> Source:
    return Source(
        config=w.config, log=w.bus, model_dir=w.run.model_dir, checkpoints=w.run.checkpoints, foreign="", record=None, initial_digest=""
    )


@pytest.mark.process
async def test_a_tap_of_a_run_with_a_gap(tmp_path: Path) -> None:
    async with with_a_gap(tmp_path) as (w, number), asyncio.timeout(120):
        with raises(ConfigError, gap=f"1.{number}") as caught:
            await tapped(w, "before")
        assert "nothing leads across that gap" in caught.value.message and "streamrl tap" in caught.value.hint
        main = [entry for entry in await read_ledger(w.bus, w.config.run.name) if entry.version.epoch == 1 and entry.gap is UNSET]
        after = await tapped(w, "after", first=number)
        assert [entry.version.number for entry in after] == list(range(number + 1, END + 1))
        assert [entry.used for entry in after] == [entry.used for entry in main]

        differences = config_differences(w.config, read_config(f"{w.run.path}:after"))
        assert [(one.key, one.b) for one in differences] == [("trainer.optimizer.learning_rate", 0.02)]

        for path in w.run.checkpoints.glob("after-*"):
            for file in path.iterdir():
                file.write_bytes(file.read_bytes()[:10])
        with pytest.raises(CheckpointDamaged) as damaged:
            await tapped(w, "after")
        assert f"streamrl tap {w.config.run.name}" in damaged.value.hint and "streamrl up" not in damaged.value.hint


@pytest.mark.process
async def test_a_branch_of_a_run_with_a_gap(tmp_path: Path) -> None:
    async with with_a_gap(tmp_path) as (w, number), asyncio.timeout(120):
        with raises(ConfigError, gap=f"1.{number}") as caught:
            await train_branch(source(w), overrides=[ELSEWHERE], name="whole", base=tmp_path / "b", span=Range())
        assert "--from" in caught.value.hint and not (tmp_path / "b" / "whole").exists()
        _, early = await train_branch(source(w), overrides=[ELSEWHERE], name="early", base=tmp_path / "b", span=Range(last=9))
        _, late = await train_branch(source(w), overrides=[ELSEWHERE], name="late", base=tmp_path / "b", span=Range(first=number))
        assert (early.steps, late.steps) == (9, END - number)


@pytest.mark.process
async def test_a_gap_whose_beginning_is_there_is_passed(tmp_path: Path) -> None:
    """The run went on from the last version whose entry is there: what it was made of is known, as a replay of it shows."""
    async with place(tmp_path, trainer={"checkpoint_every": 4, "keep_checkpoints": 100}, data={"max_prompt_tokens": 16}) as w:
        await w.train(until=14)
        while int(w.kept[0].name[6:14]) > 8:
            w.kept[0].rename(w.run.path / w.kept[0].name)
        w.bus.lose(LEDGER, *range(11, (await w.bus.state(LEDGER)).last + 1))
        await w.train()
        main = {entry.version.number: entry for entry in await read_ledger(w.bus, w.config.run.name) if entry.gap is UNSET}
        assert [str(main[number].version) for number in (10, 11, END)] == ["0.10", "1.11", f"1.{END}"]
        async with asyncio.timeout(120):
            tapped_whole = await tapped(w, "whole")
            run, summary = await train_branch(source(w), overrides=[ELSEWHERE], name="branch", base=tmp_path / "b", span=Range())
            _, early = await train_branch(source(w), overrides=[ELSEWHERE], name="early", base=tmp_path / "b", span=Range(last=10))
        assert (summary.steps, early.steps) == (END, 10)
        for entries in (tapped_whole, read_branch_ledger(run.path)):
            assert [entry.used for entry in entries] == [main[number].used for number in range(1, END + 1)]


@pytest.mark.parametrize(("given", "passed"), [(3, True), (4, False)])
async def test_a_gap_that_comes_beside_a_tap_is_passed_unless_what_it_made_void_was_given(run_id: str, given: int, passed: bool) -> None:
    bus, subjects = MemoryBus(run_id), Subjects(run_id)

    async def write(version: Version, gap: Gap | UnsetType = UNSET) -> None:
        entry = LedgerEntry(run=run_id, trainer="main", version=version, source="", used=(), cursor=0, granted=9, retired=0, gap=gap)
        await bus.publish(subjects.ledger("main"), encode(entry))

    async def next_of(number: int) -> Version:
        while (entry := parent.at(number)) is None:
            await asyncio.sleep(0.01)
        return entry.version

    for number in range(1, 6):
        await write(Version(0, number))
    state = FoldState(granted=2, grants=((2, 0),))
    parent = FollowedLedger(bus, asyncio.get_running_loop(), subjects, "main", after=state, hint="so")
    async with asyncio.timeout(20):
        assert [await next_of(number) for number in range(1, given + 1)] == [Version(0, number) for number in range(1, given + 1)]
        await write(Version(1, 3), LOST)
        await write(Version(1, 4))
        if passed:
            while not parent.gaps():
                await asyncio.sleep(0.01)
            assert [gap.version for gap in parent.gaps()] == [Version(1, 3)]
            assert await next_of(4) == Version(1, 4) and parent.at(5) is None
        else:
            with raises(ConfigError, gap="1.3"):
                await next_of(6)
    parent.close()
    await bus.close()


async def test_a_gap_that_comes_while_a_tap_reads_is_an_error_and_no_silence(run_id: str) -> None:
    bus, subjects = MemoryBus(run_id), Subjects(run_id)
    gap = LedgerEntry(run=run_id, trainer="main", version=Version(1, 2), source="", used=(), cursor=0, granted=9, retired=0, gap=LOST)
    parent = FollowedLedger(bus, asyncio.get_running_loop(), subjects, "main", after=FoldState(granted=2, grants=((2, 0),)), hint="so")
    await bus.publish(subjects.ledger("main"), encode(gap))
    async with asyncio.timeout(20):
        with raises(ConfigError, gap="1.2"):
            while parent.at(1) is None:
                await asyncio.sleep(0.01)
    parent.close()
    await bus.close()


async def test_a_tap_behind_a_gap_is_given_none_of_the_entries_that_the_gap_made_void(run_id: str) -> None:
    bus, subjects = MemoryBus(run_id), Subjects(run_id)

    async def write(version: Version, gap: Gap | UnsetType = UNSET) -> None:
        entry = LedgerEntry(run=run_id, trainer="main", version=version, source="", used=(), cursor=0, granted=9, retired=0, gap=gap)
        await bus.publish(subjects.ledger("main"), encode(entry))

    for number in (1, 2, 3, 4, 4 + AHEAD):
        await write(Version(0, number))
    await write(Version(1, 2), LOST)
    await write(Version(1, 3))
    state = FoldState(version=Version(1, 2), granted=9, grants=((9, 0),), epochs=(Epoch(0, 0, 4 + AHEAD), Epoch(1, 3)))
    parent = FollowedLedger(bus, asyncio.get_running_loop(), subjects, "main", after=state, hint="so")
    async with asyncio.timeout(20):
        while (entry := parent.at(3)) is None:
            await asyncio.sleep(0.01)
    assert entry.version == Version(1, 3) and parent.at(4) is None
    parent.close()
    await bus.close()
