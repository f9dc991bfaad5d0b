"""How deep the clipped loss lies below the live trainer's loop."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from msgspec.structs import replace
from torch import Tensor

from streamrl.algorithms import policy_losses
from streamrl.algorithms.importance import ratio_of
from tests.loop.test_lockstep import lockstep_config
from tests.support.harness import run_to_end
from tests.support.ups import begun

pytestmark = pytest.mark.process
"""The rewards of these runs are functions, which have processes of their own."""

DEEPEST = 7


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
