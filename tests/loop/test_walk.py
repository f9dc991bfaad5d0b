"""Count the product files that a lockstep sample walks through, and the frames between the trainer's loop and the clipped loss."""

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor

import streamrl
from scripts.house import kept
from streamrl.algorithms import policy_losses
from streamrl.algorithms.importance import ratio_of
from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import Config, RewardConfig
from streamrl.data.model import ensure_model
from tests.loop.test_lockstep import lockstep_config
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.ups import begun

PACKAGE = Path(streamrl.__file__).parent


def config_of_one_group(tmp_path: Path, run_id: str) -> Config:
    """One group of two rollouts a version, scored without a process."""
    tmp_path.mkdir()
    config = lockstep_config(tmp_path, run_id, "table")
    tasks = replace(config.tasks, batch_tasks=1, num_rollouts=2)
    return replace(config, run=replace(config.run, steps=2), tasks=tasks, reward=RewardConfig(kind="exact_match"))


@contextmanager
def entered_files() -> Iterator[set[str]]:
    """The files of which this thread, or one that starts meanwhile, calls a function."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])  # type: ignore[arg-type]


async def trains(tmp_path: Path, run_id: str) -> None:
    """Run feeder, producer, engine and trainer for two versions on the bus in memory."""
    run, config = make_run(tmp_path, config_of_one_group(tmp_path, run_id))
    ensure_model(config, run.model_dir)
    bus = MemoryBus(run_id, config.bus)
    await run_to_end(config, run, bus)
    assert [entry.version.number for entry in await read_ledger(bus, run_id)] == [1, 2]
    await bus.close()


async def test_a_sample_walks_through_no_more_files_than_the_house_allows(tmp_path: Path, run_id: str) -> None:
    with entered_files() as entered:
        await trains(tmp_path / "first", run_id)
        entered.clear()  # of modules that were imported, and of what is made once a process
        await trains(tmp_path / "second", run_id)
        walk = sorted({str(path.relative_to(PACKAGE)) for name in entered if (path := Path(name)).is_relative_to(PACKAGE)})
    allowed = kept()["walk.lockstep"]
    assert len(walk) <= allowed, f"walk.lockstep in scripts/house.toml: expected at most {allowed}, got {len(walk)}: {' '.join(walk)}"


DEEPEST = 7


@pytest.mark.process  # rewards that are functions have processes of their own
async def test_from_the_loop_to_the_clipped_loss_it_is_a_few_frames(tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[list[str]] = []

    def looking(log_ratio: Tensor) -> Tensor:
        stacks.append([frame.name for frame in traceback.extract_stack()[:-1]])
        return ratio_of(log_ratio)

    monkeypatch.setattr(policy_losses, "ratio_of", looking)
    config = lockstep_config(tmp_path, run_id, "torch")
    async with begun(tmp_path, replace(config, run=replace(config.run, steps=1))) as (run, config, bus):
        await run_to_end(config, run, bus)
    names = stacks[0]
    path = names[names.index("_train") - 1 :]
    assert (path[0], path[-1]) == ("run", "ppo_clip")
    assert len(path) <= DEEPEST, path
