"""One end of a transport in a process of its own, and what it says of a measurement."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Protocol

import msgspec

from benchmarks.bus.payload import NUM_PATTERNS, group
from benchmarks.bus.plan import Cell
from streamrl.errors import BusError
from streamrl.schemas.samples import Sample


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
                samples=self.samples,
                tokens=self.tokens,
            )


class Sender(ABC):
    """A producer's end that sends one message after the other; a message is a list of samples as the project has them in hand."""

    def __init__(self) -> None:
        self._messages: list[list[Any]] = []

    @abstractmethod
    def form(self, sample: Sample) -> Any:
        """The sample as the project has it before it sends."""

    @abstractmethod
    def renumber(self, formed: Any, task: int) -> Any:
        """The same as another task's."""

    @abstractmethod
    def send(self, message: list[Any]) -> None:
        """Encode and send."""

    def prepare(self, order: Order) -> None:
        patterns = [[self.form(sample) for sample in group(order.cell, pattern)] for pattern in range(NUM_PATTERNS)]
        tasks = range(order.first_task, order.first_task + order.num_tasks)
        self._messages = [[self.renumber(one, task) for one in patterns[number % NUM_PATTERNS]] for number, task in enumerate(tasks)]

    def run(self) -> Ran:
        start_s, cpu_s = time.monotonic(), time.process_time()
        for message in self._messages:
            self.send(message)
        ran = Ran(start_s=start_s, end_s=time.monotonic(), cpu_s=time.process_time() - cpu_s, messages=len(self._messages))
        self._messages = []
        return ran


class Receiver(ABC):
    """A consumer's end that takes one message after the other."""

    _order: Order | None = None

    def prepare(self, order: Order) -> None:
        self._order = order

    @abstractmethod
    def receive(self) -> tuple[int, int, int]:
        """Wait for a message and decode it: its samples, their tokens, its bytes. Raises BusError when none comes."""

    def run(self) -> Ran:
        assert self._order is not None
        counts = Counts(self._order)
        start_s, cpu_s = time.monotonic(), time.process_time()
        while not counts.complete:
            samples, tokens, nbytes = self.receive()
            counts.add(samples=samples, tokens=tokens, nbytes=nbytes)
        return counts.ran(start_s=start_s, end_s=time.monotonic(), cpu_s=time.process_time() - cpu_s)
