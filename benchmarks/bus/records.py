"""What a bus benchmark writes down: one record a measurement."""

from __future__ import annotations

import msgspec

from benchmarks.bus.plan import Cell, Transport
from benchmarks.machine import Machine


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One shape over one transport in one round."""

    transport: Transport
    cell: Cell
    round: int
    wall_s: float
    """From the producer's start to the consumer's last decoded sample."""
    producer_s: float
    """CPU seconds."""
    server_s: float
    consumer_s: float
    tasks: int
    messages: int
    """As they were read; a large task is several messages of ours."""
    samples: int
    tokens: int
    nbytes: int
    """Of message bodies; 0 where they are not seen."""


class BusRun(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a report is made from."""

    machine: Machine
    rounds: int
    left_out: dict[str, str]
    """Transports that were asked for and could not be had, and why."""
    measured: list[Measured]
