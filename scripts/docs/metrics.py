"""The table of all metrics, from `streamrl/telemetry/names.py`."""

from __future__ import annotations

from streamrl.telemetry.names import METRICS


def metrics_table() -> str:
    """Name, unit, reduction and meaning, in the order of their declaration."""
    rows = [f"| `{one.name}` | {one.unit} | {one.reduction} | {one.meaning} |" for one in METRICS.values()]
    return "\n".join(["| name | unit | reduction | meaning |", "|---|---|---|---|", *rows])
