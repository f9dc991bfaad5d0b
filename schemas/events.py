"""What people look at: lifecycle events and metrics. Nothing depends on them."""

from __future__ import annotations

from typing import Any

import msgspec

NUMERICS_EVENT = "numerics"
"""Event by which a trainer tells the values behind the fingerprint digest of its ledger entries."""
NOTICE_EVENT = "notice"
"""Event by which a worker tells people something that they should know; its detail has `text`."""


FULL_STREAM = "stalled: stream full"
"""State of a worker that waits for room on a stream, and"""
FULL_BLOBS = "stalled: sample blobs full"
"""for what samples name, and"""
FULL_SERVER = "stalled: the server's store full"
"""where it is the server that has none: on its disk, or by its limit for all streams."""
STANDING_EVENT = "standing"
"""Event by which the supervisor says what a run waits for in which nothing has moved for a while: {what, hint, since_s}."""
FAILURES_EVENT = "failures"
"""Event by which it says what fails: {tasks, rollouts by reason, newest} since the newest batch."""
SLO_EVENT = "slo"
"""Event by which it says how the run meets its objectives, whenever that changes: {level, findings}."""
MOVING_EVENT = "moving"
"""Event by which it says that it goes on."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, on `<run>.events.<kind>`."""

    kind: str
    worker: str
    detail: dict[str, Any] = {}
    time_s: float = 0.0
    """Unix seconds."""


class MetricReport(msgspec.Struct, frozen=True, kw_only=True):
    """Named values of one worker, on `<run>.metrics.<worker>`, grouped by how several reports become one number."""

    worker: str
    mean: dict[str, float] = {}
    sum: dict[str, float] = {}
    """Amounts since the worker's previous report."""
    max: dict[str, float] = {}
    last: dict[str, float] = {}
    histograms: dict[str, tuple[int, ...]] | msgspec.UnsetType = msgspec.UNSET
    """Lengths of answers since the worker's previous report (`streamrl.core.lengths`); not on the wire when unset."""
    time_s: float = 0.0
    """Unix seconds."""
    left: bool | msgspec.UnsetType = msgspec.UNSET
    """True: the worker was told to end, and this is its last report."""
    tasks: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Indices of tasks that a producer has in hand: some of them where they are many. Not on the wire when unset."""
