"""What `bench loop` writes down while it measures."""

from __future__ import annotations

import msgspec

from benchmarks.loop.plain import Trained
from benchmarks.loop.ways import LoopSpec
from benchmarks.machine import Machine


class LoopRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one contender: the measured batches, those at the start left out."""

    part: str
    """`overhead` or `tail`."""
    label: str
    """The way, or `asynchronous` and `lockstep`."""
    round: int
    seconds: float
    """From the end of the last batch left out to the end of the last one."""
    batches: list[Trained]
    cpu_s: dict[str, float]
    """By kind of process, in these seconds."""
    load: float = 0.0
    """Of the machine, at the end."""


class LoopRaw(msgspec.Struct, frozen=True, kw_only=True):
    """All of a benchmark."""

    spec: LoopSpec
    machine: Machine
    runs: list[LoopRun]
