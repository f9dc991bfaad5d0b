"""Taps and branches of a run that has lost versions, and branches of one that has refused records."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import UNSET, UnsetType

from streamrl.bus.memory import MemoryBus
from streamrl.core.records import Ended, Rewarded, Rollouts
from streamrl.core.state import Epoch, FoldConfig, FoldState
from streamrl.errors import CheckpointDamaged, ConfigError
from streamrl.history.branch import train_branch
from streamrl.history.branch_file import read_branch_ledger
from streamrl.history.branch_fold import begin, take
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
from tests.support.ledgers import entry
from tests.support.records import view
from tests.support.refusals import refused
from tests.support.world.place import Place, place

END = 12
SIZES: dict[str, Any] = {
    "run": {"steps": END},
    "trainer": {"checkpoint_every": 2, "keep_checkpoints": 100},
    "data": {"max_prompt_tokens": 16},
}
LOST = Gap(lost="end", missing=((3, 5),), highest=Version(0, 5), known_by="manifest")
ELSEWHERE = "trainer.optimizer.learning_rate=0.02"


async def tapped(w: Place, name: str, first: int = 0) -> list[LedgerEntry]:
    worker = Worker(config=w.config, run_dir=w.run, bus=w.bus, kind="trainer", index=1)
    await tap(worker, TapSettings(name=name, first=first, overrides=(ELSEWHERE,)))
    return await read_ledger(w.bus, w.config.run.name, name)


def source(w: Place) -> Source:
    return Source(
        config=w.config, log=w.bus, model_dir=w.run.model_dir, checkpoints=w.run.checkpoints, foreign="", record=None, initial_digest=""
    )


@pytest.mark.process
@pytest.mark.usefixtures("unplotted")
async def test_a_tap_and_a_branch_of_a_run_with_a_gap(tmp_path: Path) -> None:
    """It has lost entries on its way, and those behind its newest checkpoint are not known."""
    async with place(tmp_path, **SIZES) as w, asyncio.timeout(120):
        await w.train(until=7)
        w.bus.lose(LEDGER, *range(4, (await w.bus.state(LEDGER)).last + 1))
        await w.train()
        [gap] = [entry for entry in await read_ledger(w.bus, w.config.run.name) if entry.gap is not UNSET]
        number = gap.version.number
        with refused(ConfigError, hint="streamrl tap", gap=f"1.{number}"):
            await tapped(w, "before")
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

        with raises(ConfigError, gap=f"1.{number}") as caught:
            await train_branch(source(w), overrides=[ELSEWHERE], name="whole", base=tmp_path / "b", span=Range())
        assert "--from" in caught.value.hint and not (tmp_path / "b" / "whole").exists()
        _, early = await train_branch(source(w), overrides=[ELSEWHERE], name="early", base=tmp_path / "b", span=Range(last=3))
        _, late = await train_branch(source(w), overrides=[ELSEWHERE], name="late", base=tmp_path / "b", span=Range(first=number))
        assert (early.steps, late.steps) == (3, END - number)


@pytest.mark.process
@pytest.mark.usefixtures("unplotted")
async def test_a_gap_whose_beginning_is_there_is_passed(tmp_path: Path) -> None:
    """The run went on from the last version whose entry is there: what it was made of is known, as a replay of it shows."""
    async with place(tmp_path, **SIZES) as w:
        await w.train(until=7)
        while int(w.kept[0].name[6:14]) > 4:
            w.kept[0].rename(w.run.path / w.kept[0].name)
        w.bus.lose(LEDGER, *range(6, (await w.bus.state(LEDGER)).last + 1))
        await w.train()
        main = {entry.version.number: entry for entry in await read_ledger(w.bus, w.config.run.name) if entry.gap is UNSET}
        assert [str(main[number].version) for number in (5, 6, END)] == ["0.5", "1.6", f"1.{END}"]
        async with asyncio.timeout(120):
            tapped_whole = await tapped(w, "whole")
            run, summary = await train_branch(source(w), overrides=[ELSEWHERE], name="branch", base=tmp_path / "b", span=Range())
            _, early = await train_branch(source(w), overrides=[ELSEWHERE], name="early", base=tmp_path / "b", span=Range(last=5))
        assert (summary.steps, early.steps) == (END, 5)
        for entries in (tapped_whole, read_branch_ledger(run.path)):
            assert [entry.used for entry in entries] == [main[number].used for number in range(1, END + 1)]


class Followed:
    """A ledger that is written by hand, and a tap's view of it."""

    def __init__(self, run_id: str) -> None:
        self.bus, self.subjects = MemoryBus(run_id), Subjects(run_id)
        self.parent: FollowedLedger | None = None

    async def write(self, version: Version, gap: Gap | UnsetType = UNSET) -> None:
        made = entry(version.number, epoch=version.epoch, run=self.subjects.run, cursor=0, gap=gap)
        await self.bus.publish(self.subjects.ledger("main"), encode(made))

    def follow(self, after: FoldState) -> FollowedLedger:
        self.parent = FollowedLedger(self.bus, asyncio.get_running_loop(), self.subjects, "main", after=after, hint="so")
        return self.parent

    async def next_of(self, number: int) -> Version:
        assert self.parent is not None
        while (entry := self.parent.at(number)) is None:
            await asyncio.sleep(0)
        return entry.version


BEGUN = FoldState(granted=2, grants=((2, 0),))


@pytest_asyncio.fixture
async def followed(run_id: str) -> AsyncIterator[Followed]:
    made = Followed(run_id)
    yield made
    assert made.parent is not None
    made.parent.close()
    await made.bus.close()


@pytest.mark.parametrize(("given", "passed"), [(3, True), (4, False)])
async def test_a_gap_beside_a_tap_is_passed_unless_what_it_made_void_was_given(followed: Followed, given: int, passed: bool) -> None:
    for number in range(1, 6):
        await followed.write(Version(0, number))
    parent = followed.follow(BEGUN)
    assert [await followed.next_of(number) for number in range(1, given + 1)] == [Version(0, number) for number in range(1, given + 1)]
    await followed.write(Version(1, 3), LOST)
    await followed.write(Version(1, 4))
    if passed:
        while not parent.gaps():
            await asyncio.sleep(0)
        assert [gap.version for gap in parent.gaps()] == [Version(1, 3)]
        assert await followed.next_of(4) == Version(1, 4) and parent.at(5) is None
    else:
        with raises(ConfigError, gap="1.3"):
            await followed.next_of(6)


async def test_gaps_that_come_while_a_tap_reads_or_before_it_make_entries_void(followed: Followed) -> None:
    followed.follow(BEGUN)
    await followed.write(Version(1, 2), LOST)
    with raises(ConfigError, gap="1.2"):
        await followed.next_of(1)
    for number in (1, 2, 3, 4, 4 + AHEAD):
        await followed.write(Version(0, number))
    await followed.write(Version(1, 2), LOST)
    await followed.write(Version(1, 3))
    epochs = (Epoch(0, 0, 4 + AHEAD), Epoch(1, 3))
    parent = followed.follow(FoldState(version=Version(1, 2), granted=9, grants=((9, 0),), epochs=epochs))
    assert await followed.next_of(3) == Version(1, 3) and parent.at(4) is None


CONFIG = FoldConfig(batch_tasks=1, max_staleness=1)
IMPOSSIBLE = {
    "an agent that there is not": Rewarded(2, 0, 0, 1.0, 1, agent="solver"),
    "a sample that there is not": Rewarded(2, 0, 0, 1.0, 1, sample=5),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_reward_that_cannot_be_ends_no_task_of_a_branch(name: str) -> None:
    state = begin(CONFIG, CONFIG)
    for record in (Rollouts(1, "main", 0, 2, (view(0), view(1))), IMPOSSIBLE[name], Rewarded(3, 0, 0, 1.0, 1), Rewarded(4, 0, 1, 0.0, 1)):
        state = take(state, record, CONFIG, CONFIG)
    assert state.own.ready == state.parent.ready == 1
    assert [drop.reason for drop in state.own.drops] == [drop.reason for drop in state.parent.drops] == ["poison"]


def test_an_end_that_cannot_be_ends_its_task_in_both() -> None:
    state = begin(CONFIG, CONFIG)
    for record in (Rollouts(1, "main", 0, 2, (view(0),)), Ended(2, "main", 0, 0, 7, "failed")):
        state = take(state, record, CONFIG, CONFIG)
    assert state.own.retired == state.parent.retired == 1
