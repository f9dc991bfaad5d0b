"""User functions as rewards: `def score(task, episode, **options)`, plain or async, that gives a number or named parts."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from streamrl.errors import SchemaError
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RolloutTask

logger = logging.getLogger(__name__)

TOTAL = "reward"
"""Name of the part that is the reward itself; without it the reward is the sum of the parts."""


InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs plain functions somewhere else than in the event loop."""


class FunctionReward:
    """Lifts a function of one episode to a `Reward`; what it raises fails that one rollout.

    A reward whose `by_episode` is true has a call, a time limit and perhaps a process for each episode where it runs in children
    (`streamrl.producers.children.graders`); one that is `plain` too runs in the main thread there, through its `in_thread`.

    Args:
        function: async, or plain.
        options: handed to it as keyword arguments.
        in_thread: runs the calls of a plain one; None: they run where they are awaited.
    """

    by_episode = True

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any], *, in_thread: InThread | None = None) -> None:
        self._function = function
        self._options = dict(options)
        self._in_thread = in_thread
        self.plain = in_thread is not None and not inspect.iscoroutinefunction(function)
        """Whether it runs in a thread."""

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """One call of the function per episode, in order."""
        if self._in_thread is None or not self.plain:
            return [await self._finished(task, episode, self._called(task, episode)) for episode in episodes]
        called = await self._in_thread(lambda: [self._called(task, episode) for episode in episodes])
        return [await self._finished(task, episode, given) for episode, given in zip(episodes, called, strict=True)]

    def _called(self, task: RolloutTask, episode: ScoredEpisode) -> Any:
        """What the function gives (a coroutine, if it is async) or raises."""
        try:
            return self._function(task, episode, **self._options)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # written policy: an error in user code costs its rollout, `sys.exit` too
            return _failed(task, episode, error)

    async def _finished(self, task: RolloutTask, episode: ScoredEpisode, given: Any) -> RewardValue | Exception:
        if isinstance(given, Exception):
            return given
        try:
            return as_value(await given if inspect.isawaitable(given) else given)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # as above
            return _failed(task, episode, error)


def _failed(task: RolloutTask, episode: ScoredEpisode, error: BaseException) -> Exception:
    what = type(error).__name__
    logger.warning("event=reward_failed task=%d row=%d rollout=%d error=%s", task.index, task.row, episode.rollout, what, exc_info=error)
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def as_value(given: Any) -> RewardValue:
    """A number, a bool, or a table of named numbers to a RewardValue; raises SchemaError for anything else."""
    if isinstance(given, RewardValue):
        return given
    if isinstance(given, Mapping):
        parts = {str(name): number(value, f"part {name!r}") for name, value in given.items()}
        if not parts:
            raise SchemaError("a reward must be a number or named parts, got no parts", got="no parts")
        return RewardValue(parts.pop(TOTAL) if TOTAL in parts else sum(parts.values()), parts)
    return RewardValue(number(given, "reward"))


def number(given: Any, name: str) -> float:
    """A number, whatever its type; raises SchemaError for anything else."""
    # float("1.5") works, but a reward that comes as text is a mistake.
    if isinstance(given, str | bytes):
        raise SchemaError(f"a reward must be a number or named parts, got {given!r} for {name}", part=name, got=repr(given))
    try:
        return float(given)
    except (TypeError, ValueError) as error:
        raise SchemaError(
            f"a reward must be a number or named parts, got {type(given).__name__} for {name}", part=name, got=type(given).__name__
        ) from error
