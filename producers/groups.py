"""A task to its scored group: the producer's episodes, the run's reward, and what became of rollouts that gave none."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from streamrl.engines.protocol import Engine
from streamrl.errors import EngineError, SchemaError, StreamRLError
from streamrl.producers.chat_format import opens_thought
from streamrl.producers.children.graders import Hung
from streamrl.producers.children.jobs import NOTHING, Job, Keeping, job
from streamrl.producers.children.pool import Children
from streamrl.producers.episode import Episode, branch_problem, drawn
from streamrl.producers.filtering import Filter
from streamrl.producers.protocol import Context, Failure, Producer, Tokenizer
from streamrl.producers.slots import asked, phase
from streamrl.rewards.layers import close as close_reward
from streamrl.rewards.protocol import Reward, RewardValue
from streamrl.schemas.tasks import RolloutTask

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Group(msgspec.Struct, frozen=True):
    """What a task gave: every rollout has episodes or one failure, never both."""

    episodes: tuple[Episode, ...]
    failures: tuple[Failure, ...]


class GroupRunner:
    """Rolls tasks out and scores them; user code runs in children.

    Args:
        producer: makes the episodes in this process; None: the children have it.
        reward: scores those whose producer gave none, in this process; None: the children have it, or it comes later
            (`streamrl.producers.late`).
        engine: what is asked.
        tokenizer: of the policy.
        options: `producer.options`.
        max_len: longest sequence in tokens.
        chat_template: whether prompts are chat messages.
        template_kwargs: variables of the chat template.
        tool_calls: how the model writes calls of tools.
        children: run user code; None: there is none. Closed with the runner.
        max_deaths: children that one task may kill, alone in them (`tasks.max_deliveries`).
        filter: what rollouts have to pass once they are scored; None: nothing. Closed with the runner.
        objectives: parts that every reward must have; a rollout whose reward lacks one ends as failed.
    """

    def __init__(
        self,
        *,
        producer: Producer | None,
        reward: Reward | None,
        engine: Engine,
        tokenizer: Tokenizer,
        options: Mapping[str, Any],
        max_len: int,
        chat_template: bool,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_calls: str = "auto",
        children: Children | None = None,
        max_deaths: int = 1,
        filter: Filter | None = None,
        objectives: Collection[str] = (),
    ) -> None:
        self._producer = producer
        self._reward = reward
        self._engine = engine
        self._tokenizer = tokenizer
        self._options = options
        self._max_len = max_len
        self._chat_template = chat_template
        self._template_kwargs = template_kwargs or {}
        self._tool_calls = tool_calls
        self._children = children
        self._max_deaths = max_deaths
        self._filter = filter
        self._objectives = objectives

    @property
    def notice(self) -> str:
        """What people should know of user code now; empty: nothing."""
        return next((children.notice for children in self._pools if children.notice), "")

    def hung_s(self) -> list[float]:
        """Of each task whose user code hangs: for how long."""
        return [seconds for children in self._pools for seconds in children.hung_s()]

    def take_hung_graders(self) -> Hung:
        """What hangs in the reward."""
        graders = self._children.graders if self._children is not None else None
        return Hung() if graders is None else graders.take_hung()

    async def start(self) -> None:
        """Load the user's code, if there is any; raises ConfigError when that fails."""
        for children in self._pools:
            await children.start()

    async def close(self) -> None:
        """End the children, and what the reward has open."""
        await close_reward(self._reward)
        for children in self._pools:
            await children.close()

    @property
    def _pools(self) -> list[Children]:
        return [children for children in (self._children, self._filter and self._filter.children) if children]

    async def run(self, task: RolloutTask, *, keeping: Keeping = NOTHING) -> Group:
        """Roll out and score one task; raises EngineError when engines stay away.

        Args:
            task: the task.
            keeping: what the bus keeps of it while it is worked on.
        """
        if self._children is None:
            return await self._run(task, None, keeping)
        engine = asked(self._engine)
        async with job(self._children, task, engine=engine, keeping=keeping, max_deaths=self._max_deaths) as found:
            return await self._run(task, found, keeping)

    async def score(self, task: RolloutTask, episodes: Sequence[Episode]) -> Group:
        """Score what somebody else has rolled out, in the same way; the rollouts that have a reward keep it.

        Raises:
            ConfigError: the user's code can no longer be loaded.
        """
        if self._children is None:
            return await self._score(task, None, episodes, {})
        async with job(self._children, task, engine=self._engine, keeping=NOTHING, max_deaths=self._max_deaths) as found:
            return await self._score(task, found, episodes, {})

    async def _run(self, task: RolloutTask, job: Job | None, keeping: Keeping) -> Group:
        if self._producer is not None:
            given = await self._in_process(self._producer, task, keeping)
        elif job is not None:
            given = await job.roll_out()
        else:
            raise ValueError("a producer is needed, here or in the children")
        episodes, failures = _settle(task, given)
        group = await self._score(task, job, episodes, failures)
        return group if self._filter is None else await self._filtered(task, self._filter, group)

    async def _filtered(self, task: RolloutTask, filter: Filter, group: Group) -> Group:
        with phase("reward"):
            refused = await filter.refused(task, group.episodes)
        left = {failure.rollout for failure in refused}
        if {episode.rollout for episode in group.episodes} - left - {task.baseline}:
            # A filter is about what is trained: the greedy rollout stays as long as another does.
            left.discard(task.baseline)
            refused = [failure for failure in refused if failure.rollout in left]
        kept = tuple(episode for episode in group.episodes if episode.rollout not in left)
        return Group(kept, tuple(sorted((*group.failures, *refused), key=lambda failure: failure.rollout)))

    async def _in_process(self, producer: Producer, task: RolloutTask, keeping: Keeping) -> Sequence[Episode | Failure]:
        context = Context(
            engine=asked(self._engine),
            tokenizer=self._tokenizer,
            task=task,
            seed=task.seed,
            options=self._options,
            log=logger,
            max_len=self._max_len,
            chat_template=self._chat_template,
            template_kwargs=self._template_kwargs,
            tool_calls=self._tool_calls,
            resumes=keeping.resumes,
            store=keeping.store,
            images=keeping.images,
        )
        given = await _guarded(task, "producer", lambda: producer.rollout(task, context))
        return _all_failed(task, given) if isinstance(given, Failure) else given

    async def _score(self, task: RolloutTask, job: Job | None, episodes: Sequence[Episode], failures: dict[int, Failure]) -> Group:
        rewarded = {(episode.rollout, episode.agent) for episode in episodes if episode.reward is not None}
        waiting = {episode.rollout for episode in episodes if (episode.rollout, episode.agent) not in rewarded}
        for episode in episodes:
            episode.thinking = opens_thought(self._tokenizer, episode.asked_ids)
        if waiting:
            with phase("reward"):
                values = await self._values(task, job, episodes)
            # A producer's own reward stands, whatever the run's would have said.
            if isinstance(values, Failure):
                failures |= {one.rollout: one for one in _all_failed(task, values) if one.rollout in waiting - failures.keys()}
                values = [None] * len(episodes)
            for episode, value in zip(episodes, values, strict=True):
                if (episode.rollout, episode.agent) in rewarded:
                    continue
                if isinstance(value, Exception):
                    failures[episode.rollout] = _ungraded(task, episode, value)
                elif value is not None:
                    episode.reward, episode.reward_parts = value.value, value.parts
        for episode in episodes:
            lacking = [name for name in self._objectives if not math.isfinite(episode.reward_parts.get(name, math.nan))]
            if episode.reward is not None and lacking and episode.rollout not in failures:
                failures[episode.rollout] = _ungraded(task, episode, _lacks(episode, lacking[0]))
        now_s = time.time()
        for episode in episodes:
            episode.scored_s = now_s if episode.reward is not None else 0.0
        kept = tuple(episode for episode in episodes if episode.rollout not in failures)
        return Group(kept, tuple(failures[rollout] for rollout in sorted(failures)))

    async def _values(
        self, task: RolloutTask, job: Job | None, episodes: Sequence[Episode]
    ) -> Sequence[RewardValue | Exception | None] | Failure:
        reward = self._reward
        if reward is not None:
            return await _guarded(task, "reward", lambda: _counted(reward.score(task, episodes), len(episodes)))
        if job is not None and job.scores:
            return await job.score(episodes)
        return [None] * len(episodes)


def _ungraded(task: RolloutTask, episode: Episode, error: Exception) -> Failure:
    """Why a rollout has no reward: its grader took too long, or raised, or gave what is none."""
    timeout = isinstance(error, TimeoutError)
    text = error.message if isinstance(error, StreamRLError) else str(error) if timeout else f"{type(error).__name__}: {error}"
    where = f"(task {task.index}, row {task.row}, rollout {episode.rollout})"
    return Failure(episode.rollout, "timeout" if timeout else "failed", f"reward: {text} {where}")


def _lacks(episode: Episode, objective: str) -> SchemaError:
    parts = episode.reward_parts
    given = f"this part as {parts[objective]}" if objective in parts else f"the parts {', '.join(sorted(parts)) or 'none'}"
    return SchemaError(
        f"loss.objectives has {objective!r}, but the reward was given {given}",
        hint="have the reward give this part always, finite, or take it out of loss.objectives",
        key="loss.objectives",
    )


async def _counted(values: Awaitable[Sequence[T]], count: int) -> Sequence[T]:
    given = await values
    if len(given) != count:
        raise SchemaError(f"expected one reward for each of {count} episodes, got {len(given)}")
    return given


async def _guarded(task: RolloutTask, what: str, call: Callable[[], Awaitable[Sequence[T]]]) -> Sequence[T] | Failure:
    try:
        return await call()
    except EngineError:
        raise
    except Exception as error:  # written policy: what cannot be rolled out or scored ends as a tombstone, never the worker
        logger.warning("event=%s_failed task=%d error=%s", what, task.index, type(error).__name__, exc_info=error)
        return Failure(0, "failed", f"{what}: {type(error).__name__}: {error}")


def _settle(task: RolloutTask, given: Sequence[Episode | Failure]) -> tuple[list[Episode], dict[int, Failure]]:
    """Sort by rollout; a rollout with neither episode nor failure has failed, and a failure outweighs episodes."""
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
        elif problem := _episodes_problem(task, [episode for episode in episodes if episode.rollout == rollout]):
            failures[rollout] = Failure(rollout, "failed", problem)
    kept = (episode for episode in episodes if episode.rollout not in failures)
    return sorted(kept, key=lambda episode: episode.rollout), failures


def _episodes_problem(task: RolloutTask, of_rollout: Sequence[Episode]) -> str:
    """What is wrong with the episodes of a rollout; empty: nothing."""
    if of_rollout and of_rollout[0].rollout == task.baseline:
        turns = ((episode, segment) for episode in of_rollout for segment in episode.segments if segment.is_model)
        found = {drawn(episode, turn).temperature for episode, turn in turns}
        if found != {0.0}:
            return (
                f"rollout {task.baseline} of task {task.index} is the greedy one that the others are compared with: expected turns of "
                f"temperature 0, got {', '.join(f'{one:g}' for one in sorted(found))}; draw them by a chat, or by "
                f"context.for_rollout({task.baseline}).task.sampling"
            )
    return branch_problem(of_rollout)


def _all_failed(task: RolloutTask, failure: Failure) -> tuple[Failure, ...]:
    return tuple(msgspec.structs.replace(failure, rollout=rollout) for rollout in range(task.num_rollouts))
