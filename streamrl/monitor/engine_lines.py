"""Engines as people see them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from streamrl.monitor.numbers import EngineLine
from streamrl.schemas.control import EVALUATION_ROLE, ROLLOUT_ROLE, EnginePresence


def engine_line(name: str, engine: EnginePresence, *, newest: int, tokens_per_s: float, window: Mapping[str, float]) -> EngineLine:
    """One engine for the table.

    Args:
        name: its id.
        engine: what it has announced.
        newest: number of the newest version.
        tokens_per_s: that it samples.
        window: its worker's values of the newest window; empty where not known.
    """
    pinned = engine.role == EVALUATION_ROLE
    serving = str(engine.serving) if engine.serving else "-"
    return EngineLine(
        engine=name,
        serving=f"{serving} (pinned)" if pinned else serving,
        running=engine.running,
        waiting=engine.waiting,
        slots=engine.slots,
        behind=max(0, newest - engine.serving.number) if engine.serving and engine.role == ROLLOUT_ROLE else None,
        tokens_per_s=max(0.0, tokens_per_s),
        prefix_hits=window.get("rollout/prefix_cache_hit_rate"),
        degraded="" if isinstance(engine.degraded, msgspec.UnsetType) else engine.degraded,
        pinned=pinned,
    )


def worker_of(engine: str) -> str:
    """The worker that runs an engine: its name is the beginning of the engine's id, `engine-0` of `engine-0-1f2e3d`."""
    return "-".join(engine.split("-")[:2])
