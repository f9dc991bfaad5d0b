"""Filters of the user's: a function of a task and its scored episodes that says which of them are trained.

It runs in children of its own, behind the reward. What it refuses ends as a tombstone, which is its verdict on the log: a replay decides
alike and needs none of its code. Where it raises, gives what is no verdict, or takes too long, the group has failed: it is never kept.

In the children it is a reward (`Keep`) whose numbers are verdicts, so that limits, suspects and dead processes are what they are there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streamrl.config.plugins import Form, check_form, resolve
from streamrl.engines.protocol import Engine
from streamrl.errors import SchemaError, StreamRLError
from streamrl.producers.children.jobs import NOTHING, job
from streamrl.producers.children.pool import Children
from streamrl.producers.children.remote import in_thread
from streamrl.producers.episode import Episode
from streamrl.producers.protocol import Failure
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.ledger import FILTER, filter_reason
from streamrl.schemas.tasks import RolloutTask

FILTER_FORM = Form(
    key="filters.function",
    what="filter",
    takes=("task", "episodes"),
    hint="write `def keep(task, episodes)`, which returns True, False or (False, 'why'), or a list of one for each episode; see "
    "docs/algorithms.md",
)
KEEP = "streamrl.producers.filtering.Keep"
"""What children are told to load in a reward's place."""
_KEPT = RewardValue(1.0)


class Keep:
    """Lifts a filter to a reward: 1 for an episode that is kept, 0 for one that is refused, its reason as the name of a part.

    Args:
        function: `filters.function`.
        options: `filters.options`, handed to it as keyword arguments.

    Raises:
        ConfigError: it cannot be found, or takes other arguments.
    """

    def __init__(self, function: str, options: Mapping[str, Any], base: Path | None = None) -> None:
        self._function = resolve(function, what=FILTER_FORM.what, key=FILTER_FORM.key, base=base)
        check_form(FILTER_FORM, function, self._function, tuple(options))
        self._options = dict(options)

    async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue | Exception]:
        """One verdict for each episode; raises what the filter raises, and SchemaError for what is no verdict."""
        if inspect.iscoroutinefunction(self._function):
            given = await self._function(task, episodes, **self._options)
        else:
            given = await in_thread(lambda: self._function(task, episodes, **self._options))
        return [RewardValue(0.0, {one: 0.0}) if one else _KEPT for one in verdicts(given, len(episodes))]


def verdicts(given: Any, num_episodes: int) -> list[str]:
    """For each episode why it is refused (`filter`, or `filter: ` and the reason given); empty where it is kept.

    Args:
        given: True, False or (False, reason) for all episodes, or a list of one of these for each.
        num_episodes: in the group.

    Raises:
        SchemaError: it is something else. None is no verdict: a filter that forgot to return would else decide.
    """
    if not isinstance(given, list):
        return [_verdict(given)] * num_episodes
    if len(given) != num_episodes:
        raise SchemaError(f"expected a verdict for each of {num_episodes} episodes, got {len(given)}", got=len(given))
    return [_verdict(one) for one in given]


def _verdict(given: Any) -> str:
    kept, reason = given if isinstance(given, tuple) and len(given) == 2 else (given, "")
    if not isinstance(kept, bool | np.bool_) or not isinstance(reason, str):
        shown = repr(given)
        raise SchemaError(
            f"expected a filter to give True, False or (False, reason), got {shown[:80]}", hint=FILTER_FORM.hint, got=type(given).__name__
        )
    return "" if kept else filter_reason(reason)


class Filter:
    """Asks the filter about groups.

    Args:
        children: which have `Keep` as their reward. Closed with the filter.
        engine: of the worker's; no filter asks it.
        max_deaths: children that one task may kill, alone in them.
    """

    def __init__(self, children: Children, *, engine: Engine, max_deaths: int = 1) -> None:
        self.children = children
        self._engine = engine
        self._max_deaths = max_deaths

    async def refused(self, task: RolloutTask, episodes: Sequence[Episode]) -> tuple[Failure, ...]:
        """Of which rollouts not every episode is kept, and why; all of them where there is no verdict.

        Args:
            task: the task.
            episodes: of the rollouts that are scored, by rollout.

        Raises:
            ConfigError: the user's code can no longer be loaded.
        """
        rollouts = sorted({episode.rollout for episode in episodes})
        if not rollouts:
            return ()
        async with job(self.children, task, engine=self._engine, keeping=NOTHING, max_deaths=self._max_deaths) as asked:
            given = await asked.score(episodes)
        if isinstance(given, Failure):
            detail = given.detail.replace("reward:", "filter:", 1).replace("reward.timeout_s", "filters.timeout_s")
            return tuple(msgspec.structs.replace(given, rollout=rollout, detail=detail) for rollout in rollouts)
        found: dict[int, Failure] = {}
        for episode, value in zip(episodes, given, strict=True):
            if isinstance(value, Exception):
                text = value.message if isinstance(value, StreamRLError) else f"{type(value).__name__}: {value}"
                found[episode.rollout] = Failure(episode.rollout, "failed", f"filter: {text}")
            elif value.value != _KEPT.value:
                # What a child says is user code's word, too.
                reason = next((name for name in value.parts if name.startswith(FILTER)), FILTER)
                found.setdefault(episode.rollout, Failure(episode.rollout, filter_reason(reason)))
        return tuple(found[rollout] for rollout in sorted(found))
