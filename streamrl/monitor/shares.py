"""Where the workers' time went: what they report of it, the time of which they say nothing, and the shares of a window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from msgspec.structs import replace

from streamrl.schemas.events import MetricReport
from streamrl.telemetry.states import DOWN, STATES, seconds, share

SILENT_S = 6.0
"""A worker that has not reported its time for so long is taken for away; it does so every two seconds."""
FORGOTTEN_AFTER_S = 300.0
"""One that has been away for so long has left the run."""
_NEAR_S = 0.1
"""Two ways to measure one stretch of time differ by less."""
MOST_TIMED = 1024
"""Workers whose time is followed."""
_SLOTS = "producer/slots"
_KINDS = {seconds(kind, state): kind for kind, states in STATES.items() for state in states}
"""Whose time a metric is."""


class _Timed(msgspec.Struct):
    """A worker that reports its time."""

    kind: str
    slots: float
    until_s: float
    """Its time is accounted for up to then, by its own clock."""
    heard_s: float
    """Of its last report, by the reader's clock."""
    accounted_s: float
    """Its time is accounted for up to then, by the reader's clock."""
    assumed_s: float = 0.0
    """Of the time accounted for since its last report: counted as `down`."""


class Attendance:
    """Follows the workers' reports of their time, so that no second counts twice and none is left out.

    What lies between two reports and is in neither is `down`: the process was away, or a report got lost that no later one makes good.
    One that was told to end is not away: its time ends with its last report.
    """

    def __init__(self) -> None:
        self._timed: dict[str, _Timed] = {}

    def taken(self, one: MetricReport, now_s: float) -> list[MetricReport]:
        """What is to be counted of a report that has come at `now_s`, and the time before it that its worker was away."""
        found = self._taken(one, now_s)
        if one.left is True:
            self._timed.pop(one.worker, None)
        return found

    def _taken(self, one: MetricReport, now_s: float) -> list[MetricReport]:
        kind = next((_KINDS[name] for name in one.sum if name in _KINDS), "")
        if not kind:
            return [one]
        slots = max(1.0, one.last.get(_SLOTS, 1.0))
        spent = {name: one.sum[name] for name in named(kind) if name in one.sum}
        spent_s = sum(spent.values()) / slots
        known = self._timed.get(one.worker)
        if known is None:
            if len(self._timed) < MOST_TIMED:
                self._timed[one.worker] = _Timed(kind, slots, one.time_s, now_s, now_s)
            return [one]
        # A clock that was set is not time that has passed: of that, the reader's clock knows the most.
        away_s = min(one.time_s - spent_s - known.until_s, now_s - known.accounted_s + SILENT_S)
        counted_s = min(-away_s, known.assumed_s)
        self._timed[one.worker] = _Timed(kind, slots, one.time_s, now_s, now_s)
        if away_s > _NEAR_S:
            return [_away(one.worker, known, away_s), one]
        if counted_s > _NEAR_S and spent_s > 0:
            # It was taken for away, and was not.
            part = max(0.0, 1.0 - counted_s / spent_s)
            return [replace(one, sum={**one.sum, **{name: amount * part for name, amount in spent.items()}})]
        return [one]

    def silent(self, now_s: float) -> Iterator[MetricReport]:
        """The time up to `now_s` of the workers that have been silent for long; none while nobody has been heard: the reader is cut off."""
        if not self._timed or now_s - max(one.heard_s for one in self._timed.values()) > SILENT_S:
            return
        for worker, one in list(self._timed.items()):
            if now_s - one.heard_s > FORGOTTEN_AFTER_S:
                del self._timed[worker]
            elif now_s - one.heard_s > SILENT_S:
                away_s = now_s - one.accounted_s
                one.until_s += away_s
                one.accounted_s = now_s
                one.assumed_s += away_s
                yield _away(worker, one, away_s)


def _away(worker: str, one: _Timed, away_s: float) -> MetricReport:
    return MetricReport(worker=worker, sum={seconds(one.kind, DOWN): away_s * one.slots})


def named(kind: str) -> Iterator[str]:
    """The metrics of the seconds of a kind's states, those of which it says nothing included."""
    return (seconds(kind, state) for state in (*STATES[kind], DOWN))


def shares(values: Mapping[str, float]) -> dict[str, float]:
    """Shares of a window by its seconds, and who starved; a state that was not entered has a share of 0."""
    found: dict[str, float] = {}
    for kind, states in STATES.items():
        spent = {state: values.get(seconds(kind, state), 0.0) for state in (*states, DOWN)}
        total = sum(spent.values())
        if total > 0:
            found |= {share(kind, state): amount / total for state, amount in spent.items()}
            if kind == "engine":
                found["starvation/engines_saturated"] = min(1.0, values.get("engine/saturated_s", 0.0) / total)
    return found | {name: found[of] for name, of in _STARVED.items() if of in found}


_STARVED = {
    "starvation/trainer": share("trainer", "wait_samples"),
    "starvation/producers": share("producer", "wait_credit"),
    "starvation/engines_idle": share("engine", "idle"),
}
