"""The swap: which buffer is served, and how the other one takes over between two forward passes."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import msgspec
import torch
from torch import nn

from streamrl.engines.live_swap.buffers import Buffers
from streamrl.engines.live_swap.graphs import GraphSets
from streamrl.engines.live_swap.memory import copy_all
from streamrl.engines.live_swap.messages import UNSTAMPED, CommitLog, Committed, stamp_of
from streamrl.schemas.versions import Version

KEPT_COMMITS = 4096


class Swap:
    """Both buffers of a rank and the version that is served.

    `commit` is called by the scheduler's thread between two forward passes; all else by the channel's thread.

    Args:
        buffers: the two sets.
        graphs: their graph sets; None in the copy modes, whose graphs never change.
    """

    def __init__(self, buffers: Buffers, graphs: GraphSets | None) -> None:
        self.buffers = buffers
        self.model: nn.Module = buffers.model
        self.device = buffers.parameters[0].device
        self._graphs = graphs
        self._flips = graphs is not None
        self._lock = threading.Lock()
        self._staged: Version | None = None
        self.serving: Version | None = None
        self.stamp = UNSTAMPED
        """Of the version served, for the tokens of the next forward pass."""
        self.released: torch.cuda.Event | None = None
        """After it nothing on the device reads or writes the idle buffer any more."""
        self._commits: deque[Committed] = deque(maxlen=KEPT_COMMITS)
        self._asked = 0
        self._timers: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def begin_staging(self) -> int:
        """The idle set, which no commit takes until `end_staging`."""
        with self._lock:
            self._staged = None
            return 1 - self.buffers.active

    def end_staging(self, version: Version) -> None:
        """The idle set holds this version as a whole."""
        with self._lock:
            self._staged = version

    def commit(self, version: Version, *, forward: int, stream: Any, copy: bool = False) -> Committed:
        """Serve the staged version from the next forward pass on, if it is this one and newer than what is served.

        Args:
            version: the one to serve.
            forward: forward passes launched so far.
            stream: that forward passes run on.
            copy: copy the staged set over the served one even where a flip is possible.
        """
        started = time.perf_counter()
        with self._lock:
            reason = self._refusal(version)
            if not reason:
                self._take_over(stream, flip=self._flips and not copy)
                self.serving, self.stamp, self._staged = version, stamp_of(version), None
        self._asked += 1
        done = Committed(
            index=self._asked,
            version=version,
            committed=not reason,
            reason=reason,
            forward=forward,
            host_ms=(time.perf_counter() - started) * 1e3,
            at_s=time.monotonic(),
        )
        self._commits.append(done)
        return done

    def log(self, after: int) -> CommitLog:
        """The commit requests after the `after`-th."""
        with self._lock:
            return CommitLog(
                serving=self.serving, staged=self._staged, commits=tuple(self._timed(done) for done in self._commits if done.index > after)
            )

    def _refusal(self, version: Version) -> str:
        if self.serving is not None and version <= self.serving:
            return f"{self.serving} is being served"
        if self._staged != version:
            return f"expected {version} to be staged, got {self._staged or 'nothing'}"
        return ""

    def _take_over(self, stream: Any, *, flip: bool) -> None:
        if flip:
            assert self._graphs is not None
            idle = 1 - self.buffers.active
            # Forward passes launched so far read the set that becomes idle now.
            self.released = self._recorded(stream)
            self.buffers.point(idle)
            self._graphs.switch(idle)
            return
        served, staged = list(self.buffers.sets[self.buffers.active]), list(self.buffers.sets[1 - self.buffers.active])
        if self.device.type != "cuda":
            with torch.no_grad():
                copy_all(served, staged)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.no_grad(), torch.cuda.stream(stream):
            begin.record(stream)
            copy_all(served, staged)
            end.record(stream)
        self.released = end
        self._timers[self._asked + 1] = (begin, end)

    def _recorded(self, stream: Any) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _timed(self, done: Committed) -> Committed:
        timer = self._timers.get(done.index)
        if timer is None or not timer[1].query():
            return done
        return msgspec.structs.replace(done, device_ms=timer[0].elapsed_time(timer[1]))
