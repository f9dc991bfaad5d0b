"""`remote`: rewards that a server of the user's gives, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from streamrl.config import reward_kinds
from streamrl.errors import StreamRLError
from streamrl.rewards.asking import Asking
from streamrl.rewards.functions import as_value
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RolloutTask


class Remote:
    """One POST of `{prompt, response, label, metadata}` an episode, all of a group at once; the answer is a number or a table of numbers.

    Args:
        options: checked.
    """

    in_children: ClassVar[bool] = False

    def __init__(self, options: reward_kinds.Remote) -> None:
        self._asking = Asking(options.url, options, what="reward remote")

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """A RewardError or SchemaError in place of a value where the server gives none."""
        return await each(episodes, lambda episode: self._one(task, episode))

    async def close(self) -> None:
        """Close its connections."""
        await self._asking.close()

    async def _one(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        body = {
            "prompt": task.prompt,
            "response": episode.completion,
            "label": task.label,
            "metadata": {**task.metadata, **episode.metadata},
        }
        if episode.thinking:
            body["thinking"] = True
        return as_value(await self._asking.post(body, where=place(task, episode)))


async def each(
    episodes: Sequence[ScoredEpisode], one: Callable[[ScoredEpisode], Awaitable[RewardValue]]
) -> Sequence[RewardValue | Exception]:
    """All at once; the errors that streamrl raises on purpose in place of their values."""

    async def settled(episode: ScoredEpisode) -> RewardValue | Exception:
        try:
            return await one(episode)
        except StreamRLError as error:
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(settled(episode)) for episode in episodes]
    return [task.result() for task in tasks]


def place(task: RolloutTask, episode: ScoredEpisode) -> str:
    """Which one, in words."""
    return f"row {task.row} (task {task.index}, rollout {episode.rollout})"
