"""How a run meets its objectives, as the page shows it: what the supervisor has said, beside the bounds that it judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streamrl.config.metrics import SloConfig
from streamrl.monitor.numbers import Finding, Level
from streamrl.monitor.slo import OBJECTIVES, worst_of
from streamrl.runtime.rundir import RunDir

_METRICS = {
    "p95_age": "staleness/p95",
    "stream_lag_s": "lag/stream_s",
    "versions_behind": "lag/versions_behind",
    "starvation": "starvation/trainer",
}
"""Metrics whose newest value is what is held against the bound; the others have a value while they are not met."""


def objectives_of(config: SloConfig, findings: Sequence[Finding] | None, newest: Mapping[str, float]) -> dict[str, Any]:
    """A line for each objective that has a bound.

    Args:
        config: bounds.
        findings: what is not met now; None: the supervisor has said nothing yet.
        newest: newest value of each metric of the run.
    """
    unmet = {one.objective: one for one in findings or ()}
    lines: list[dict[str, Any]] = []
    for objective in OBJECTIVES:
        bound = float(getattr(config, objective))
        if bound <= 0:
            continue
        found = unmet.get(objective)
        line: dict[str, Any] = {"objective": objective, "bound": bound, "value": newest.get(_METRICS.get(objective, ""))}
        if found is not None:
            line |= {"value": found.value, "level": found.level, "since_s": found.since_s}
            line["causes"] = [{"what": cause.what, "hint": cause.hint} for cause in found.causes]
        else:
            line["level"] = None if findings is None else Level.OK
        lines.append(line)
    level = None if findings is None else worst_of(*(one.level for one in findings))
    return {"level": level, "lines": lines}


def worst_over(run: RunDir, config: SloConfig) -> dict[str, str]:
    """Of a run that is over, the worst level of each objective with a bound; empty where its summary says nothing."""
    try:
        found = msgspec.json.decode(run.summary_path.read_bytes(), type=_Summary).slo
    except (OSError, msgspec.MsgspecError):
        return {}
    return {} if found is None else {one: found.get(one, Level.OK) for one in OBJECTIVES if getattr(config, one) > 0}


class _Summary(msgspec.Struct, frozen=True):
    slo: dict[str, Level] | None = None
