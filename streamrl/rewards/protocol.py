"""The reward seam: the episodes of one task in, one value for each of them out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from streamrl.errors import SchemaError
from streamrl.schemas.samples import Status
from streamrl.schemas.tasks import RolloutTask

LARGEST = 1e38
"""Advantages are float32 where they are trained on."""


class RewardValue(msgspec.Struct, frozen=True):
    """A reward and the named parts it was made of (parts are kept with the sample; `loss.objectives` alone trains on them)."""

    value: float
    parts: dict[str, float] = {}

    def __post_init__(self) -> None:
        for name, number in (("value", self.value), *self.parts.items()):
            if not abs(number) <= LARGEST:  # not so for NaN, either
                bound = f" and at most {LARGEST:g} in size" if math.isfinite(number) else ""
                raise SchemaError(
                    f"a reward must be finite{bound}, got {name} = {number}",
                    hint="a rollout without a reward is ended by raising",
                    part=name,
                    got=repr(number),
                )


class ScoredEpisode(Protocol):
    """What a reward sees of an episode (`streamrl.producers.episode.Episode` is one)."""

    @property
    def rollout(self) -> int:
        """Index of its rollout within the task's group."""
        ...

    @property
    def agent(self) -> str:
        """Whose it is, where that is an agent with a reward of its own; empty: it shares the rollout's."""
        ...

    @property
    def turns(self) -> Sequence[str]:
        """Decoded text of each of the model's turns, stop token left out."""
        ...

    @property
    def completion(self) -> str:
        """The last of `turns`."""
        ...

    @property
    def thinking(self) -> bool:
        """Whether the last turn begins within a thought that its prompt has opened (`<think>` of a chat template)."""
        ...

    @property
    def status(self) -> Status: ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the producer left for the reward."""
        ...


class Reward(Protocol):
    """Scores a task's episodes. Adapters: `exact_match` and any user function (`streamrl.rewards.functions`)."""

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """One value per episode, in their order.

        All episodes of a group come in one call, so a reward may compare them. An exception in place of a value fails that episode's
        rollout; raising fails the whole task. Of several episodes of one rollout, or of one `agent` in it, the last one's value counts.
        """
        ...
