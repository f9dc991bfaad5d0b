"""Where a version's bytes are read from on a trainer's device (`streamrl.engines.live_swap.images` has those in files)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from streamrl.engines.live_swap.side import Side
from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Copying
from streamrl.tensors.buckets import MARK_BYTES, Buckets
from streamrl.weights.protocol import CudaSource


class DeviceSpan:
    """Device memory that holds bytes `first .. end` of a version's concatenation.

    Args:
        first: byte of the concatenation.
        data: [n] uint8.
        offset: first byte in the buffer that `data` is a view of.
        buckets: what is complete of the buffer; None: all of it.
    """

    def __init__(self, first: int, data: Tensor, offset: int = 0, buckets: Buckets | None = None) -> None:
        self.first = first
        self.end = first + data.numel()
        self.data = data
        self._offset = offset
        self._buckets = buckets

    def wait(self, end: int) -> None:
        """Return when all bytes before `end` of the concatenation that lie here are complete; raises as `Buckets.wait`."""
        if self._buckets is not None:
            self._buckets.wait(self._offset + end - self.first)


class DeviceImages:
    """Trainers' device memory, opened once for each buffer: a trainer publishes from a few buffers in turn.

    A dead trainer's buffers are closed when its successor's are opened: until then they keep its memory from being freed.
    """

    def __init__(self, device: torch.device, side: Side) -> None:
        self._device = device
        self._side = side
        self._open: dict[tuple[str, bytes], Tensor] = {}

    def close_others(self, source: CudaSource) -> bool:
        """Close what belongs to no owner of `source`; call it before `spans`. True if there was any: no view of it may be kept then."""
        owners = {memory.owner for memory in source.memory}
        kept = {key: data for key, data in self._open.items() if key[0] in owners}
        closed, self._open = len(kept) < len(self._open), kept
        return closed

    def spans(self, source: CudaSource) -> Sequence[DeviceSpan]:
        """The memory of a source, in the order of the concatenation.

        Raises:
            WeightSyncError: memory that cannot be opened here, or that has no room for the marks of its buckets.
        """
        spans: list[DeviceSpan] = []
        followed: dict[str, Buckets | None] = {}
        first = 0
        for memory in source.memory:
            whole = self._opened(memory.owner, memory.handle)
            if memory.owner not in followed:
                followed[memory.owner] = self._followed(whole, source.copying.get(memory.owner))
            data = whole[memory.offset : memory.offset + memory.nbytes]
            if data.numel() != memory.nbytes:
                raise WeightSyncError(f"expected {memory.nbytes} bytes at {memory.offset} of a device buffer, got {data.numel()}")
            first = first if memory.start is None else memory.start
            spans.append(DeviceSpan(first, data, memory.offset, followed[memory.owner]))
            first += memory.nbytes
        return spans

    def _followed(self, whole: Tensor, copying: Copying | None) -> Buckets | None:
        if copying is None:
            return None
        nbytes = MARK_BYTES * len(copying.ends)
        marks = whole[copying.at : copying.at + nbytes]
        if copying.at % MARK_BYTES or marks.numel() != nbytes:
            raise WeightSyncError(
                f"expected the marks of {len(copying.ends)} buckets at {copying.at} of a device buffer, got none", at=copying.at
            )
        return Buckets(copying, partial(self._side.look, marks.view(torch.int64)), where="a version in device memory")

    def _opened(self, owner: str, handle: bytes) -> Tensor:
        known = self._open.get((owner, handle))
        if known is None:
            # Not at the top: streams and handles of CUDA are of no use on a CPU.
            from streamrl.tensors.cuda_ipc import open_shared

            known = self._open[owner, handle] = open_shared(handle, self._device)
        return known
