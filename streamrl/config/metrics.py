"""The section `metrics`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from streamrl.config.bounds import Section


class MetricsConfig(Section, frozen=True, kw_only=True):
    """What is kept of a run's metrics in its directory (docs/metrics.md)."""

    window_s: Annotated[float, Meta(ge=1)] = 10.0
    """Seconds in a row of what is no batch's."""
    file_bytes: Annotated[int, Meta(ge=1 << 16)] = 64 << 20
    """A file is put aside and a new one begun at this size."""
    keep_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Of files put aside the oldest go once they are together above this; 0: there are none."""
