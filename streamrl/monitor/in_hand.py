"""What producers have in hand, and what hangs in the processes that score, by their newest reports."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from streamrl.schemas.events import MetricReport

_IN_FLIGHT = "producer/in_flight_tasks"
_HUNG, _HUNG_S = "producer/hung_tasks", "producer/hung_s"
_GRADERS, _GRADERS_S, _ENDED_EARLY = "reward/hung", "reward/hung_s", "reward/ended_early_total"
_ROLLOUTS = "producer/rollouts_total"
_MOST = 1e9


def _sound(value: float) -> float:
    """A count or seconds as they can be; any login may report anything."""
    return min(max(0.0, value), _MOST) if math.isfinite(value) else 0.0


class _Held(msgspec.Struct, frozen=True):
    tasks: float
    hung: float
    hung_s: float
    rollouts: float
    """Published since the report before."""


class InHand:
    """Tasks by producer.

    Args:
        most: workers of which something is remembered, beside those that are there.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[str, _Held] = {}
        self._graders: dict[str, tuple[float, float]] = {}
        """Calls of rewards that hang, and for how long, by producer or rewarder."""
        self.graders_ended = 0
        """Graders that were ended early, as too many hung."""

    def report(self, one: MetricReport, *, there: Collection[str]) -> None:
        """A worker's report; `there` are the workers that are."""
        if _GRADERS in one.mean:
            if len(self._graders) > self._most:
                self._graders = {name: hung for name, hung in self._graders.items() if name in there}
            self.graders_ended += round(_sound(one.sum.get(_ENDED_EARLY, 0.0)))
            self._graders[one.worker] = _sound(one.mean[_GRADERS]), _sound(one.max.get(_GRADERS_S, 0.0))
        if _IN_FLIGHT not in one.mean:
            return
        if len(self._held) > self._most:
            self._held = {name: held for name, held in self._held.items() if name in there}
        self._held[one.worker] = _Held(
            _sound(one.mean[_IN_FLIGHT]),
            _sound(one.mean.get(_HUNG, 0.0)),
            _sound(one.max.get(_HUNG_S, 0.0)),
            _sound(one.sum.get(_ROLLOUTS, 0.0)),
        )

    def forget(self, worker: str) -> None:
        """It has left."""
        self._held.pop(worker, None)
        self._graders.pop(worker, None)

    @property
    def tasks(self) -> dict[str, float]:
        """By producer."""
        return {name: held.tasks for name, held in self._held.items()}

    @property
    def hung_tasks(self) -> int:
        """How many of them hang."""
        return round(sum(held.hung for held in self._held.values()))

    @property
    def hung_s(self) -> float:
        """For how long, the longest."""
        return max((held.hung_s for held in self._held.values()), default=0.0)

    @property
    def hung_graders(self) -> int:
        """Calls of rewards that hang."""
        return round(sum(calls for calls, _ in self._graders.values()))

    @property
    def hung_graders_s(self) -> float:
        """For how long, the longest."""
        return max((seconds for _, seconds in self._graders.values()), default=0.0)

    def is_idle(self, producer: str) -> bool:
        """Whether it is known to hold nothing and to have published nothing."""
        held = self._held.get(producer)
        return held is not None and not held.tasks and not held.rollouts
