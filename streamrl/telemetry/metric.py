"""What is said of a metric."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Reduction(StrEnum):
    """How several values of one metric become one."""

    MEAN = "mean"
    """Arithmetic mean."""
    SUM = "sum"
    """Amounts since the previous report add up."""
    MAX = "max"
    """The largest."""
    LAST = "last"
    """The newest."""


class Metric(msgspec.Struct, frozen=True):
    """One declared metric."""

    name: str
    reduction: Reduction
    unit: str
    meaning: str
    when: str = ""
    """The condition under which it exists, where that is not every run."""
    stays: str = ""
    """Why it may keep one value over a whole run; empty: it moves."""
