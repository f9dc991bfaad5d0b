"""The table of all metrics, from `streamrl/telemetry/names.py`."""

from __future__ import annotations

from streamrl.telemetry.names import METRICS, REWARD_PART, Metric
from streamrl.telemetry.set_names import SET_METRICS


def metrics_table() -> str:
    """Name, unit, reduction and meaning, in the order of their declaration."""
    declared = (*METRICS.values(), REWARD_PART, *SET_METRICS.values())
    rows = [f"| `{one.name}` | {one.unit} | {one.reduction} | {told(one)} |" for one in declared]
    return "\n".join(["| name | unit | reduction | meaning |", "|---|---|---|---|", *rows])


def told(one: Metric) -> str:
    """Its meaning, the condition under which it exists, and why it may stay as it is."""
    return one.meaning + (f"; only when {one.when}" if one.when else "") + (f"; stays the same: {one.stays}" if one.stays else "")
