"""One end of a transport in a process of its own, and what it says of a measurement."""

from __future__ import annotations

from typing import Protocol

import msgspec

from benchmarks.bus.plan import Cell
from streamrl.errors import BusError


class Order(msgspec.Struct, frozen=True):
    """What to send, or to read: tasks `first_task`, ... of one shape."""

    cell: Cell
    first_task: int
    num_tasks: int


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What one end did. Times are seconds of the host's monotonic clock, equal in all processes."""

    start_s: float
    end_s: float
    cpu_s: float
    """Of this process, all threads."""
    messages: int = 0
    samples: int = 0
    tokens: int = 0
    nbytes: int = 0
    """Of message bodies; 0 where this end does not see bytes."""
    producer_cpu_s: float = 0.0
    """Where this end has the other one in its care (Ray)."""
    server_cpu_s: float = 0.0


class Lane(Protocol):
    """A producer's or a consumer's end."""

    def prepare(self, order: Order) -> None:
        """Make everything ready that is not measured."""
        ...

    def run(self) -> Ran:
        """Send, or read and decode, all of it."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class Counts:
    """Adds up what arrived."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.messages = 0
        self.samples = 0
        self.tokens = 0
        self.nbytes = 0

    @property
    def complete(self) -> bool:
        """Whether every sample is here."""
        return self.samples >= self._order.cell.samples * self._order.num_tasks

    def add(self, *, samples: int, tokens: int, nbytes: int) -> None:
        """Count one message."""
        self.messages += 1
        self.samples += samples
        self.tokens += tokens
        self.nbytes += nbytes

    def ran(self, *, start_s: float, end_s: float, cpu_s: float, producer_cpu_s: float = 0.0, server_cpu_s: float = 0.0) -> Ran:
        """What this end did; raises BusError unless exactly what was sent has come."""
        self._check()
        return Ran(
            start_s=start_s,
            end_s=end_s,
            cpu_s=cpu_s,
            messages=self.messages,
            samples=self.samples,
            tokens=self.tokens,
            nbytes=self.nbytes,
            producer_cpu_s=producer_cpu_s,
            server_cpu_s=server_cpu_s,
        )

    def _check(self) -> None:
        cell = self._order.cell
        wanted = (cell.samples * self._order.num_tasks, cell.samples * cell.tokens * self._order.num_tasks)
        if (self.samples, self.tokens) != wanted:
            raise BusError(
                f"bench bus, {cell.name}: expected {wanted[0]} samples of {wanted[1]} tokens in all, got {self.samples} of {self.tokens}",
                hint="does something else use the same server?",
            )
