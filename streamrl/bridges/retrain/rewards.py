"""The reward bridge: retrain's `RewardCalculator`, or the environment's own rewards, as the reward of a rollout.

An error of the calculator fails its rollout. It is never a 0 that nobody gave, and never the reward that was there before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from streamrl.bridges.retrain.environments import given
from streamrl.bridges.retrain.formats import RawRolloutData, finite
from streamrl.errors import SchemaError

Combine = Literal["sum", "mean", "last"]
"""How the rewards of an episode's turns become one: added up, their mean, or that of the last turn."""


class Rewards(msgspec.Struct, frozen=True):
    """Of one episode."""

    reward: float
    per_turn: tuple[float, ...]
    """As the calculator gave them, before they were combined."""
    parts: dict[str, float]
    """`environment` and `calculator`: what each gave, over all turns; not with a reward_range, where they do not add up to the reward."""


class RewardBridge:
    """Asks the calculator about one episode at a time, so that its memory is bounded by an episode.

    Args:
        make: makes the calculator, an object with `process_rollouts(rollouts)`, `async` or not; None: the environment's rewards stand.
        combine: how the turns' rewards become one.
        reward_range: (low, high) between which the combined reward must lie; it is then put on [0, 1], so that rewards of several scales
            can be trained together. None: as it is.
    """

    def __init__(
        self, make: Callable[[], Any] | None, *, combine: Combine = "sum", reward_range: tuple[float, float] | None = None
    ) -> None:
        self._make = make
        self._combine = combine
        self._range = reward_range
        self._calculator: Any = None

    async def score(self, raw: RawRolloutData) -> Rewards:
        """The rewards of an episode.

        Raises:
            SchemaError: the calculator gave no finite number for a turn, another number of turns, or says that it failed; or the reward is
                out of its range.
            Exception: what the calculator raised, as it is.
        """
        own = [float(reward) for reward in raw["intrinsic_rewards_per_turn"]]
        per_turn = own if self._make is None else await self._asked(self._make, raw)
        reward = {"sum": math.fsum(per_turn), "mean": math.fsum(per_turn) / len(per_turn), "last": per_turn[-1]}[self._combine]
        environment = math.fsum(own)
        parts = {"environment": environment, "calculator": math.fsum(per_turn) - environment}
        if self._range is None:
            return Rewards(reward, tuple(per_turn), parts)
        low, high = self._range
        if not low <= reward <= high:
            raise SchemaError(
                f"expected a reward in [{low:g}, {high:g}], got {reward:g}",
                hint="give reward_range the bounds of what the rewards of an episode come to together",
            )
        return Rewards((reward - low) / (high - low), tuple(per_turn), {})

    async def _asked(self, make: Callable[[], Any], raw: RawRolloutData) -> list[float]:
        if self._calculator is None:
            calculator = await given(make())
            if not callable(getattr(calculator, "process_rollouts", None)):
                raise SchemaError(f"expected a reward calculator with process_rollouts, got a {type(calculator).__name__}")
            self._calculator = calculator
        trajectories = await given(self._calculator.process_rollouts([raw]))
        if not isinstance(trajectories, list | tuple) or len(trajectories) != 1:
            raise SchemaError(f"expected one trajectory from the reward calculator for one rollout, got {_counted(trajectories)}")
        turns = _one_each(trajectories[0], len(raw["executed_llm_actions"]))
        return [_reward(turn, number) for number, turn in enumerate(turns)]


def _one_each(trajectory: Any, num_turns: int) -> Sequence[Any]:
    """One entry a turn.

    retrain's own calculator lists the turns of a rollout twice where it has rewards of whole rollouts, first without and then with them
    (retrain/reward/calculator.py, 9d8ef25); the second list counts.
    """
    if not isinstance(trajectory, list | tuple):
        raise SchemaError(f"expected a list of turns as the reward calculator's trajectory, got {_counted(trajectory)}")
    if not trajectory:
        raise SchemaError(
            "the reward calculator gave no turn for an episode, as retrain's own does where it has failed",
            hint="its own log says why: `streamrl logs RUN producer`",
        )
    if len(trajectory) == 2 * num_turns and all(map(_same_turn, trajectory, trajectory[num_turns:])):
        return trajectory[num_turns:]
    if len(trajectory) != num_turns:
        raise SchemaError(f"expected {num_turns} turns from the reward calculator, as the episode has, got {len(trajectory)}")
    return trajectory


def _same_turn(one: Any, other: Any) -> bool:
    keys = ("prompt_text", "completion_text")
    return isinstance(one, Mapping) and isinstance(other, Mapping) and all(key in one and one[key] == other.get(key) for key in keys)


def _reward(turn: Any, number: int) -> float:
    if not isinstance(turn, Mapping) or "final_combined_reward" not in turn:
        raise SchemaError(f"expected final_combined_reward in turn {number} of the reward calculator, got {_counted(turn)}")
    told = turn.get("auxiliary_data")
    if isinstance(told, Mapping) and told.get("error"):
        raise SchemaError(f"the reward calculator has failed at turn {number}: {str(told['error'])[:200]}")
    return finite(turn["final_combined_reward"], f"the reward of turn {number} by the calculator")


def _counted(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a table of {', '.join(map(str, value)) or 'nothing'}"
    return f"{len(value)}" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
