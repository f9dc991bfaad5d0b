"""The Grafana dashboard of the Prometheus sink, from `streamrl/telemetry/names.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from streamrl.monitor.sinks.names import PREFIX, prometheus_name
from streamrl.telemetry.names import METRICS, Reduction, metric

ROWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Train": (
            "rollout/raw_reward",
            "eval/heldout",
            "train/loss",
            "rollout/response_len/mean",
            "rollout/truncated_ratio",
            "tokens/trained_total",
        ),
        "Stability": (
            "train/grad_norm",
            "train/entropy_loss",
            "train/mis_k3_kl",
            "train/ess_token",
            "train/ratio_max",
            "rollout/zero_variance",
        ),
        "Performance and lag": (
            *("perf/step_s", "perf/wait_s", "staleness/p95", "lag/stream_s", "lag/stream_messages", "lag/versions_behind"),
            *("lag/publish_to_commit_s", "rollouts/dropped_total/stale"),
        ),
        "Goodput": (
            *("tokens/sampled_total", "tokens/published_total", "tokens/cut_total", "tokens/dropped_total/stale"),
            *("tokens/masked_total", "tokens/open"),
        ),
        "Lengths": (
            *("lengths/distance", "lengths/trained_p50", "lengths/trained_p95"),
            *("lengths/finished_p95", "lengths/dropped_p95", "lengths/cut_p95"),
        ),
        "Engines and producers": (
            *("engine/tokens_total", "engine/running_requests", "engine/waiting_requests", "engine/kv_cache_used", "engine/swap_ms"),
            *("producer/in_flight_tasks", "producer/hung_tasks", "bus/redelivered_total"),
        ),
    }
)
"""Metrics by row of the dashboard."""
_BY_REASON: Mapping[str, str] = MappingProxyType(
    {"rollouts/dropped_total": "rollouts decided against", "tokens/dropped_total": "sampled tokens of the rollouts decided against"}
)
"""Metrics that are counted by reason; all reasons are in one panel."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def grafana_dashboard() -> str:
    """The dashboard as JSON, to be imported into Grafana."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, names in ROWS.items():
        panels.append({"type": "row", "id": len(panels) + 1, "title": title, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})
        top += 1
        for index, name in enumerate(names):
            place = {"x": 8 * (index % 3), "y": top + 7 * (index // 3), "w": 8, "h": 7}
            panels.append(_panel(len(panels) + 1, name, place))
        top += 7 * -(-len(names) // 3)
    return (
        json.dumps(
            {
                "title": "streamrl",
                "uid": "streamrl",
                "schemaVersion": 39,
                "refresh": "10s",
                "time": {"from": "now-1h", "to": "now"},
                "templating": {
                    "list": [
                        {"name": "datasource", "type": "datasource", "query": "prometheus"},
                        {
                            **{"name": "run", "type": "query", "datasource": _SOURCE, "multi": True, "includeAll": True, "refresh": 2},
                            "query": f"label_values({PREFIX}version, run)",
                        },
                    ]
                },
                "panels": panels,
            },
            indent=1,
        )
        + "\n"
    )


def _panel(number: int, name: str, place: dict[str, int]) -> dict[str, Any]:
    called, reason = prometheus_name(name)
    amount = metric(name).reduction is Reduction.SUM
    chosen = f'{called}{{run=~"$run"}}'
    shown = METRICS[name]
    counted = name.removesuffix(f"/{reason}")
    unit = f"{shown.unit}{'/s' if amount else ''}"
    return {
        "type": "timeseries",
        "id": number,
        "title": f"{counted}, by reason ({unit})" if reason else f"{name} ({unit})",
        "description": _BY_REASON[counted] if reason else shown.meaning,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": [
            {
                "refId": "A",
                "datasource": _SOURCE,
                "expr": f"rate({chosen}[1m])" if amount else chosen,
                "legendFormat": "{{run}} {{reason}}" if reason else "{{run}} {{worker}}",
            }
        ],
    }
