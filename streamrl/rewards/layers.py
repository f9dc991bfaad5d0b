"""What is put around a reward: the answer taken out of its box, the part that is trained, the kind that a row names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from streamrl.config.reward import row_reward, whole
from streamrl.errors import ConfigError, SchemaError
from streamrl.rewards.answers import BoxedEpisode
from streamrl.rewards.functions import TOTAL, InThread, as_value
from streamrl.rewards.protocol import Reward, RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RewardSpec, RolloutTask

MOST = 256
"""Rewards, by kind and options, that rows of one run may name."""


async def close(reward: Reward | None) -> None:
    """End what a reward has open: connections, a sandbox. Most have nothing."""
    closing: Any = getattr(reward, "close", None)
    if closing is not None:
        await closing()


class Boxed:
    """A reward that is shown what the last box holds.

    Args:
        inner: that reward.
    """

    def __init__(self, inner: Reward) -> None:
        self._inner = inner
        self.plain = bool(getattr(inner, "plain", False))
        """Whether it runs in a thread."""
        self.by_episode = bool(getattr(inner, "by_episode", False))
        """Whether episodes are scored one by one."""

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """As the inner one."""
        return await self._inner.score(task, [BoxedEpisode(episode) for episode in episodes])

    async def close(self) -> None:
        """End what the inner one has open."""
        await close(self._inner)


class Keyed:
    """A reward of which one part is trained.

    Args:
        inner: that reward; it gives named parts.
        key: the part; all parts are kept.
    """

    def __init__(self, inner: Reward, key: str) -> None:
        self._inner = inner
        self._key = key
        self.plain = bool(getattr(inner, "plain", False))
        """Whether it runs in a thread."""
        self.by_episode = bool(getattr(inner, "by_episode", False))
        """Whether episodes are scored one by one."""

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """A SchemaError in place of a value without the part."""
        values = await self._inner.score(task, episodes)
        return [self._part(task, episode, value) for episode, value in zip(episodes, values, strict=True)]

    async def close(self) -> None:
        """End what the inner one has open."""
        await close(self._inner)

    def _part(self, task: RolloutTask, episode: ScoredEpisode, given: Any) -> RewardValue | Exception:
        if isinstance(given, Exception):
            return given
        try:
            value = as_value(given)
        except SchemaError as error:
            return error
        if self._key in value.parts:
            return RewardValue(value.parts[self._key], value.parts)
        if self._key == TOTAL:
            return value
        return SchemaError(
            f"reward.key = {self._key!r}: row {task.row} (task {task.index}, rollout {episode.rollout}) was given the parts "
            f"{', '.join(sorted(value.parts)) or 'none'}",
            hint="name one of them in reward.key, or have the reward give this one always",
            key="reward.key",
            row=task.row,
        )


class ByRow:
    """The reward that a row names, else the run's; each is built once, when its first row comes.

    Args:
        run: that of the run.
        build: makes one of a kind and its options.
        shared: `data.reward_options`.
        alone: the run's looks at each episode alone, as those that rows may name do.
        in_thread: runs plain functions of the run's, where it has some; a call's time counts from its first one on.
    """

    def __init__(
        self,
        run: Reward,
        build: Callable[[str, Mapping[str, Any]], Reward],
        shared: Mapping[str, Mapping[str, Any]],
        *,
        alone: bool,
        in_thread: InThread | None = None,
    ) -> None:
        self.plain = bool(getattr(run, "plain", False))
        """Whether the run's runs in a thread."""
        self.by_episode = alone or bool(getattr(run, "by_episode", False))
        """Whether episodes are scored one by one."""
        self._run = run
        self._build = build
        self._shared = shared
        self._in_thread = in_thread
        self._made: dict[bytes, asyncio.Task[Reward]] = {}

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """As that one; raises ConfigError for a kind, or options, that no row may have."""
        reward = await self._of(task)
        if self._in_thread is not None and self.plain and not getattr(reward, "plain", False):
            await self._in_thread(lambda: None)  # one that asks a server would else have all the time there is
        return await reward.score(task, episodes)

    async def close(self) -> None:
        """End what they have open."""
        await close(self._run)
        for made in await asyncio.gather(*self._made.values(), return_exceptions=True):
            if not isinstance(made, BaseException):
                await close(made)

    async def _of(self, task: RolloutTask) -> Reward:
        if not isinstance(task.reward, RewardSpec):
            return self._run
        # Rows were checked when they were read; a task is whatever has come over the wire.
        spec = row_reward({"kind": task.reward.kind, "options": task.reward.options}, self._shared)
        options = whole(spec, self._shared)
        key = msgspec.json.encode([spec.kind, options], order="deterministic")
        if key not in self._made:
            if len(self._made) >= MOST:
                raise ConfigError(
                    f"rows name more than {MOST} different rewards, each of which is kept",
                    hint="put options that many rows share into data.reward_options, and what differs by row into its metadata",
                    key="data.reward_key",
                )
            # Libraries take seconds to load, in which the event loop has others to serve; and who waits may be cancelled.
            self._made[key] = asyncio.create_task(asyncio.to_thread(self._build, spec.kind, options))
        return await asyncio.shield(self._made[key])
