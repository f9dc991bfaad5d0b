"""How the declared metrics are called in Prometheus, which takes no slash."""

from __future__ import annotations

import re

from streamrl.telemetry.names import Reduction, metric

PREFIX = "streamrl_"


def prometheus_name(name: str) -> tuple[str, str]:
    """Name of the metric, and the value of its label `reason`; empty: it has none.

    Slashes, and `-` and `@` of sets of problems, become underscores, amounts end in `_total`, and what follows a total is its reason:
    `rollouts/dropped_total/stale` is `streamrl_rollouts_dropped_total{reason="stale"}`.
    """
    stem, total, reason = name.partition("_total/")
    called = PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", stem if total else name)
    if metric(name).reduction is Reduction.SUM:
        called = called.removesuffix("_total") + "_total"
    return called, reason
