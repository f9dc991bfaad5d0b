"""The table of all metrics, from `streamrl/telemetry/names.py`."""

from __future__ import annotations

from streamrl.telemetry.names import METRICS, Metric


def metrics_table() -> str:
    """Name, unit, reduction and meaning, in the order of their declaration."""
    rows = [f"| `{one.name}` | {one.unit} | {one.reduction} | {told(one)} |" for one in METRICS.values()]
    return "\n".join(["| name | unit | reduction | meaning |", "|---|---|---|---|", *rows])


def told(one: Metric) -> str:
    """Its meaning, and the condition under which it exists."""
    return f"{one.meaning}; only when {one.when}" if one.when else one.meaning
