"""The side stream: copies that run beside the forward passes, and the memory that bytes of a file pass through."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from streamrl.engines.live_swap.memory import copy_all

DEVICE_BYTES_S, HOST_BYTES_S = 3.6e12, 1e10
"""What copies have of an H200's memory (which can do 4.8e12), and of a host's."""


class Side:
    """Copies on a stream of their own on a GPU, in the calling thread on a CPU.

    Bytes of a file go through two pinned buffers and two buffers on the device in turn, so that reading the file, the transfer and the
    copy to the parameters overlap. All of it is used by one thread at a time.

    Args:
        device: of the parameters that are served.
        streams: that SGLang uses; torch hands out streams from a small pool, in turn.
        host_only: what is written to lies in host memory.
    """

    def __init__(self, device: torch.device, streams: Sequence[Any], *, host_only: bool = False) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stage_on_host = host_only or not self._cuda
        self._stream = _stream_beside(device, streams) if self._cuda else None
        self._checks = _stream_beside(device, [*streams, self._stream]) if self._cuda else None
        self._looks = _stream_beside(device, [*streams, self._stream, self._checks]) if self._cuda else None
        # Blocking events let the thread sleep: a spinning one would take the interpreter's lock again and again.
        self._done = torch.cuda.Event(blocking=True) if self._cuda else None
        self._copied = torch.cuda.Event() if self._cuda else None
        self._slot_free = [torch.cuda.Event(blocking=True) for _ in range(2)] if self._cuda else []
        self._slot_used = [False, False]
        self.unlike: tuple[Tensor, ...] = _unlike(device) if self._cuda else ()
        """A target and a source; with them in a window torch copies its tensors one by one, and those of consecutive bytes by the GPU's
        copy engines. Otherwise it copies all of them by a kernel, which reads another GPU's memory with the processors that forward
        passes need. Either way it is one call, and the interpreter's lock is given away for all of it."""
        self.bytes_s = DEVICE_BYTES_S if self._cuda else HOST_BYTES_S
        """Bytes read or written that take the memory from forward passes for a second."""
        self._pinned: list[Tensor] = []
        self._looked: Tensor | None = None
        self._loaded: int | None = None
        self.scratch: list[Tensor] = []
        """Two buffers that a file's bytes are copied to parameters from."""

    def reserve(self, nbytes: int) -> bool:
        """Make both buffers at least so large; True when they are new ones, so that views of the old ones are of no use."""
        if self.scratch and self.scratch[0].numel() >= nbytes:
            return False
        host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        if self._stage_on_host:
            self.scratch = host
        else:
            self._pinned = host
            self.scratch = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        return True

    @contextmanager
    def entered(self) -> Generator[None]:
        """Whatever torch is asked to do in here goes to the side stream."""
        if self._stream is None:
            with torch.no_grad():
                yield
            return
        with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def checking(self) -> Generator[None]:
        """What is asked for in here runs beside later copies, once the copies asked for so far are done."""
        if self._checks is None or self._stream is None or self._copied is None:
            yield
            return
        self._copied.record(self._stream)
        self._checks.wait_event(self._copied)
        with torch.cuda.stream(self._checks):
            yield

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the stream wait for an event of another one."""
        if event is not None and self._stream is not None:
            self._stream.wait_event(event)

    def load(self, slot: int, runs: Iterable[tuple[int, Tensor]]) -> None:
        """Bring runs of a file's bytes ([n] uint8 on the host) into a buffer, each to where it is said to begin there.

        Waits until what was in the buffer has been copied on.
        """
        if self._cuda and self._slot_used[slot]:
            self._slot_free[slot].synchronize()
        scratch = self.scratch[slot]
        for first, data in runs:
            end = first + data.numel()
            if self._stage_on_host:
                scratch[first:end].copy_(data)
            else:
                self._pinned[slot][first:end].copy_(data)
                scratch[first:end].copy_(self._pinned[slot][first:end], non_blocking=True)
        self._loaded = slot

    def copy(self, pairs: tuple[list[Tensor], list[Tensor]]) -> None:
        """Ask for the copies of one window: targets and sources."""
        copy_all(*pairs)
        slot = self._loaded
        if slot is not None and self._stream is not None:
            self._slot_free[slot].record(self._stream)
            self._slot_used[slot] = True
            self._loaded = None

    def look(self, values: Tensor) -> list[int]:
        """Numbers of a device's memory ([n] int64) as they are now, whatever copies are under way."""
        if self._looks is None:
            return values.tolist()
        if self._looked is None or self._looked.numel() < values.numel():
            self._looked = torch.empty(values.numel(), dtype=torch.int64, pin_memory=True)
        host = self._looked[: values.numel()]
        with torch.cuda.stream(self._looks):
            host.copy_(values, non_blocking=True)
            self._looks.synchronize()
        return host.tolist()

    def finish(self) -> None:
        """Wait until all that was asked for is done."""
        if self._done is not None and self._stream is not None and self._checks is not None:
            self._stream.wait_stream(self._checks)
            self._done.record(self._stream)
            self._done.synchronize()


def _unlike(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two tensors whose strides differ: what rules out one kernel for a list of copies."""
    return torch.zeros((2, 2), dtype=torch.uint8, device=device), torch.zeros((2, 2), dtype=torch.uint8, device=device).t()


def _stream_beside(device: torch.device, streams: Sequence[Any]) -> torch.cuda.Stream:
    taken = {stream.cuda_stream for stream in streams}
    while (stream := torch.cuda.Stream(device)).cuda_stream in taken:
        pass
    return stream
