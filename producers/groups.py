"""A task to its scored group: the producer's episodes, the run's reward, and what became of rollouts that gave none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from streamrl.engines.protocol import Engine
from streamrl.errors import EngineError, SchemaError
from streamrl.producers.episode import Episode
from streamrl.producers.protocol import Context, Failure, Producer, Tokenizer
from streamrl.producers.threads import HomeCall, ThreadEngine, UserThread
from streamrl.rewards.functions import as_value
from streamrl.rewards.protocol import Reward, RewardValue
from streamrl.schemas.tasks import RolloutTask

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Group(msgspec.Struct, frozen=True):
    """What a task gave: every rollout has episodes or one failure, never both."""

    episodes: tuple[Episode, ...]
    failures: tuple[Failure, ...]


class GroupRunner:
    """Rolls tasks out and scores them; user code runs in a thread of its own, so it may block.

    Args:
        producer: makes the episodes.
        reward: scores those whose producer gave none; None: their rewards come later (`streamrl.producers.late`).
        engine: what is asked, in the caller's loop.
        tokenizer: of the policy.
        user_producer: whether `producer` is user code.
        user_reward: whether `reward` is user code.
        options: `producer.options`.
        max_len: longest sequence in tokens.
        chat_template: whether prompts are chat messages.
    """

    def __init__(
        self,
        *,
        producer: Producer,
        reward: Reward | None,
        engine: Engine,
        tokenizer: Tokenizer,
        user_producer: bool,
        user_reward: bool,
        options: Mapping[str, Any],
        max_len: int,
        chat_template: bool,
    ) -> None:
        self._producer = producer
        self._reward = reward
        self._tokenizer = tokenizer
        self._user_producer = user_producer
        self._user_reward = user_reward
        self._options = options
        self._max_len = max_len
        self._chat_template = chat_template
        self._thread = UserThread() if user_producer or user_reward else None
        self._engine: Engine = ThreadEngine(engine, asyncio.get_running_loop()) if user_producer else engine

    async def close(self) -> None:
        """End the thread for user code."""
        if self._thread is not None:
            await self._thread.close()

    async def run(
        self,
        task: RolloutTask,
        *,
        resumes: Mapping[int, bytes] | None = None,
        store: Callable[..., Coroutine[Any, Any, None]] | None = None,
    ) -> Group:
        """Roll out and score one task; raises EngineError when an engine went away, nothing else.

        Args:
            task: the task.
            resumes: checkpoints of an earlier delivery by rollout.
            store: gets (rollout, data) of new ones, in the caller's loop; None: they are not stored.
        """
        home = asyncio.get_running_loop()
        context = Context(
            engine=self._engine,
            tokenizer=self._tokenizer,
            task=task,
            seed=task.seed,
            options=self._options,
            log=logger,
            max_len=self._max_len,
            chat_template=self._chat_template,
            resumes=resumes or {},
            store=HomeCall(store, home) if store is not None and self._user_producer else store,
        )
        given = await self._guard(task, "producer", lambda: self._call(self._user_producer, self._producer.rollout, task, context))
        episodes, failures = _settle(task, given)
        return await self._score(task, episodes, failures)

    async def _score(self, task: RolloutTask, episodes: Sequence[Episode], failures: dict[int, Failure]) -> Group:
        rewarded = {episode.rollout for episode in episodes if episode.reward is not None}
        reward = self._reward
        if reward is not None and any(episode.rollout not in rewarded for episode in episodes):
            values = await self._guard(task, "reward", lambda: self._values(reward, task, episodes))
            if isinstance(values, Failure):
                return Group((), _all_failed(task, values))
            for episode, value in zip(episodes, values, strict=True):
                if isinstance(value, Exception):
                    failures[episode.rollout] = Failure(episode.rollout, "failed", f"reward: {type(value).__name__}: {value}")
                elif episode.rollout not in rewarded:
                    episode.reward, episode.reward_parts = value.value, value.parts
        kept = tuple(episode for episode in episodes if episode.rollout not in failures)
        return Group(kept, tuple(failures[rollout] for rollout in sorted(failures)))

    async def _values(self, reward: Reward, task: RolloutTask, episodes: Sequence[Episode]) -> Sequence[RewardValue | Exception]:
        # User code may give plain numbers or parts, whatever its annotations say.
        values: Sequence[Any] = await self._call(self._user_reward, reward.score, task, episodes)
        if len(values) != len(episodes):
            raise SchemaError(f"expected one reward for each of {len(episodes)} episodes, got {len(values)}")
        return [value if isinstance(value, RewardValue | Exception) else as_value(value) for value in values]

    def _call(self, user_code: bool, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Awaitable[T]:
        if user_code and self._thread is not None:
            return self._thread.run(function, *args)
        return function(*args)

    async def _guard(self, task: RolloutTask, what: str, call: Callable[[], Awaitable[Sequence[T]]]) -> Sequence[T] | Failure:
        try:
            return await call()
        except EngineError:
            raise
        except Exception as error:  # written policy: an error in user code ends its task as a tombstone, never the worker
            logger.warning("event=%s_failed task=%d error=%s", what, task.index, type(error).__name__, exc_info=error)
            return Failure(0, "failed", f"{what}: {type(error).__name__}: {error}")


def _settle(task: RolloutTask, given: Sequence[Episode | Failure] | Failure) -> tuple[list[Episode], dict[int, Failure]]:
    """Sort by rollout; a rollout with neither episode nor failure has failed, and a failure outweighs episodes."""
    if isinstance(given, Failure):
        return [], {failure.rollout: failure for failure in _all_failed(task, given)}
    failures = {item.rollout: item for item in given if isinstance(item, Failure)}
    episodes = [item for item in given if isinstance(item, Episode) and item.rollout not in failures]
    known = set(failures) | {episode.rollout for episode in episodes}
    beyond = sorted(known - set(range(task.num_rollouts)))
    if beyond:
        detail = f"the producer gave rollouts {beyond}, task {task.index} has 0 to {task.num_rollouts - 1}"
        return [], {failure.rollout: failure for failure in _all_failed(task, Failure(0, "failed", detail))}
    for rollout in range(task.num_rollouts):
        if rollout not in known:
            failures[rollout] = Failure(rollout, "failed", "the producer gave neither an episode nor a failure for it")
    return sorted(episodes, key=lambda episode: episode.rollout), failures


def _all_failed(task: RolloutTask, failure: Failure) -> tuple[Failure, ...]:
    return tuple(msgspec.structs.replace(failure, rollout=rollout) for rollout in range(task.num_rollouts))
