"""Seconds of a step by part. Nothing is taken while it is off: telling parts apart makes a GPU wait at every boundary."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

REST = "prepare"
"""What is in no other part: rows, objective, metrics."""


class Stopwatch:
    """Parts exclude each other: one that is entered within another takes its time from that.

    Args:
        device: waited for at each boundary.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._part = ""
        self._since = 0.0

    @contextmanager
    def running(self) -> Generator[dict[str, float]]:
        """While entered, parts are told apart; gives their seconds, which are complete in the end."""
        self._seconds = {}
        self._switch(REST)
        try:
            yield self._seconds
        finally:
            self._switch("")

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """While entered, time is that part's."""
        if not self._part:
            yield
            return
        before = self._part
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._part:
            self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = name, now


@contextmanager
def timed(watch: Stopwatch, methods: dict[tuple[type, str], str]) -> Generator[None]:
    """While entered, every call of these methods of classes is the part that they map to."""
    with ExitStack() as stack:
        for (owner, name), part in methods.items():
            stack.enter_context(mock.patch.object(owner, name, _timed(getattr(owner, name), watch, part)))
        yield


def _timed(method: Callable[..., Any], watch: Stopwatch, part: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        with watch.part(part):
            return method(*args, **named)

    return call
