"""Forward passes: counted always, kept with the time they ended for the benchmark."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import torch

from streamrl.engines.live_swap.messages import Forward, ForwardLog

KEPT = 1 << 18
BREATH = 256
"""Events read in a row before the interpreter's lock is offered to others."""


class Forwards:
    """Counts forward passes; with `keep`, also records an event on their stream after each.

    Args:
        keep: remember them for `take`.
        device: they run on.
    """

    def __init__(self, *, keep: bool, device: torch.device) -> None:
        self.launched = 0
        self._wanted = False
        self._next = threading.Event()
        self._keep = keep
        self._cuda = device.type == "cuda"
        self._first: Any = None
        self._events: deque[tuple[int, float, Any, int, bool, int]] = deque(maxlen=KEPT)
        self._taking = threading.Lock()

    def launching(self) -> float:
        """A forward pass is about to be launched; returns the time."""
        self.launched += 1
        return time.monotonic()

    def launch_done(self, launched_s: float, stream: Any, batch: int, extend: bool, version: int) -> None:
        """It has been launched on `stream` with `batch` requests."""
        if self._wanted:
            # Only now: who is woken asks for the interpreter, which launching needs.
            self._wanted = False
            self._next.set()
        if not self._keep:
            return
        if self._cuda:
            done = torch.cuda.Event(enable_timing=True)
            done.record(stream)
        else:
            done = time.monotonic()
        if self._first is None:
            self._first = done
        self._events.append((self.launched, launched_s, done, batch, extend, version))

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until more than `seen` passes have been launched, or for `timeout_s`; one thread at a time."""
        self._next.clear()
        self._wanted = True
        if self.launched == seen:
            self._next.wait(timeout_s)

    def take(self) -> ForwardLog:
        """The passes kept since the last call that have ended on the device, and forget them."""
        with self._taking:
            taken: list[Forward] = []
            while self._events:
                index, launched_s, done, batch, extend, version = self._events[0]
                if self._cuda and not done.query():
                    break
                self._events.popleft()
                ms = self._first.elapsed_time(done) if self._cuda else (done - self._first) * 1e3
                taken.append(Forward(index, launched_s, ms, batch, extend, version))
                if len(taken) % BREATH == 0:
                    time.sleep(0)
            return ForwardLog(forwards=tuple(taken))
