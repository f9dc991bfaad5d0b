"""User functions as rewards: `def score(task, episode, **options)`, plain or async, that gives a number or named parts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.errors import SchemaError
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RolloutTask

logger = logging.getLogger(__name__)

TOTAL = "reward"
"""Name of the part that is the reward itself; without it the reward is the sum of the parts."""


class FunctionReward:
    """Lifts a function of one episode to a `Reward`; what it raises fails that one rollout.

    Called in the worker's thread for user code (`streamrl.producers.threads`), so it may block.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function = function
        self._options = dict(options)

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """One call of the function per episode, in order."""
        return [await self._one(task, episode) for episode in episodes]

    async def _one(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue | Exception:
        try:
            given = self._function(task, episode, **self._options)
            return as_value(await given if inspect.isawaitable(given) else given)
        except Exception as error:  # written policy: an error in user code costs its rollout, never the worker
            logger.warning(
                "event=reward_failed task=%d rollout=%d error=%s", task.index, episode.rollout, type(error).__name__, exc_info=error
            )
            return error


def as_value(given: Any) -> RewardValue:
    """A number, a bool, or a table of named numbers to a RewardValue; raises SchemaError for anything else."""
    if isinstance(given, RewardValue):
        return given
    if isinstance(given, Mapping):
        parts = {str(name): _number(number, f"part {name!r}") for name, number in given.items()}
        if not parts:
            raise SchemaError("a reward must be a number or named parts, got no parts", got="no parts")
        return RewardValue(parts.pop(TOTAL) if TOTAL in parts else sum(parts.values()), parts)
    return RewardValue(_number(given, "reward"))


def _number(given: Any, name: str) -> float:
    # float("1.5") works, but a reward that comes as text is a mistake.
    if isinstance(given, str | bytes):
        raise SchemaError(f"a reward must be a number or named parts, got {given!r} for {name}", part=name, got=repr(given))
    try:
        return float(given)
    except (TypeError, ValueError) as error:
        raise SchemaError(
            f"a reward must be a number or named parts, got {type(given).__name__} for {name}", part=name, got=type(given).__name__
        ) from error
