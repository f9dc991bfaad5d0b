"""Ray's object store: an actor returns the samples of a task, the trainer takes them from shared memory; arrays are read in place.

Small results travel with the answer, large ones by way of the store, as Ray decides. Nothing outlives its owner.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import ray

from benchmarks.bus.lanes import Counts, Order, Ran
from benchmarks.bus.payload import NUM_PATTERNS, group, mapping
from benchmarks.processes import cpu_of_tree, cpu_seconds

WINDOW = 16
"""Tasks under way at once, as many as our producer has."""
STORE_BYTES = 1 << 30


class Actor:
    """A producer's end; Ray runs it in a process of its own."""

    def __init__(self) -> None:
        self._order: Order | None = None
        self._patterns: list[list[dict[str, Any]]] = []

    def pid(self) -> int:
        """Process id."""
        import os

        return os.getpid()

    def prepare(self, samples: int, tokens: int) -> None:
        """Make the messages of one shape."""
        from benchmarks.bus.plan import Cell

        cell = Cell(samples, tokens)
        self._patterns = [[mapping(sample, arrays=True) for sample in group(cell, pattern)] for pattern in range(NUM_PATTERNS)]

    def make(self, task: int) -> list[dict[str, Any]]:
        """The samples of a task."""
        return [{**sample, "task": task} for sample in self._patterns[task % NUM_PATTERNS]]


class Driver:
    """The trainer's end, which starts Ray and the actor."""

    def __init__(self) -> None:
        own: dict[str, Any] = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        ray.init("local", **own, log_to_driver=False, logging_level=logging.ERROR)
        self._actor: Any = ray.remote(Actor).remote()
        self._pid: int = ray.get(self._actor.pid.remote())
        self._order: Order | None = None

    def prepare(self, order: Order) -> None:
        self._order = order
        ray.get(self._actor.prepare.remote(order.cell.samples, order.cell.tokens))

    def run(self) -> Ran:
        order = self._order
        assert order is not None
        counts = Counts(order)
        start_s, cpu_s, actor_s, tree_s = time.monotonic(), time.process_time(), cpu_seconds(self._pid), cpu_of_tree()
        for samples in self._results(range(order.first_task, order.first_task + order.num_tasks)):
            counts.add(samples=len(samples), tokens=sum(len(sample["tokens"]) for sample in samples), nbytes=0)
        end_s, cpu_s, actor_s = time.monotonic(), time.process_time() - cpu_s, cpu_seconds(self._pid) - actor_s
        tree_s = cpu_of_tree() - tree_s
        server_s = max(0.0, tree_s - actor_s)
        return counts.ran(start_s=start_s, end_s=end_s, cpu_s=cpu_s, producer_cpu_s=actor_s, server_cpu_s=server_s)

    def _results(self, tasks: Iterable[int]) -> Iterable[list[dict[str, Any]]]:
        under_way: deque[Any] = deque()
        for task in tasks:
            under_way.append(self._actor.make.remote(task))
            if len(under_way) >= WINDOW:
                yield ray.get(under_way.popleft())
        while under_way:
            yield ray.get(under_way.popleft())

    def close(self) -> None:
        ray.shutdown()
