"""A layout: the tensors of a version where they lie in its concatenation, and the plan that takes them to this rank's parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from streamrl.engines.live_swap.messages import Region, TensorEntry
from streamrl.engines.live_swap.plan import WINDOW_BYTES, Copy, Window, in_words, windows
from streamrl.engines.live_swap.recorder import DTYPES, Recording
from streamrl.errors import WeightSyncError
from streamrl.tensors.digest import WORD_BYTES


class Layout:
    """Tensors of a version, all of whose versions are laid out alike."""

    def __init__(self, entries: Sequence[TensorEntry], recording: Recording) -> None:
        self.entries = entries
        self.copies = recording.copies
        self.fills = recording.fills
        self.why = recording.why
        self.ignored = recording.ignored
        self.nbytes = max((entry.offset + entry.nbytes for entry in entries), default=0)
        self._offsets = [entry.offset for entry in entries]
        self.dtypes = [DTYPES[entry.dtype] for entry in entries]
        self._items = [dtype.itemsize for dtype in self.dtypes]
        words = [in_words(copy, self._items[copy.tensor]) for copy in self.copies]
        self.word_copies = None if self.why or None in words else tuple(copy for copy in words if copy is not None)
        """The plan counted in words of 8 bytes, to digest by; None where it cuts words."""

    @property
    def recorded(self) -> bool:
        """Versions are copied by the plan; otherwise load_weights runs each time."""
        return not self.why

    def regions(self) -> tuple[Region, ...]:
        """What is digested, in order."""
        if self.recorded:
            return tuple(copy.region() for copy in self.copies)
        return tuple(Region(index, 0, 1, n, n) for index, n in enumerate(math.prod(entry.shape) for entry in self.entries))

    def end_byte(self, copy: Copy, *, words: bool = False) -> int:
        """After the last byte that a copy (of elements, or of words) reads of the concatenation."""
        item = WORD_BYTES if words else self._items[copy.tensor]
        return self._offsets[copy.tensor] + (copy.start + (copy.rows - 1) * copy.stride + copy.cols) * item

    def cut(self, sources: Sequence[tuple[int, int]], window_bytes: int = WINDOW_BYTES) -> list[Window]:
        """The plan in windows.

        Args:
            sources: first byte and end of each source in the concatenation.
            window_bytes: source bytes that a window may span.

        Raises:
            WeightSyncError: they do not hold all the bytes that the plan wants.
        """
        result = windows(self.copies, self._offsets, self._items, sources, window_bytes)
        wanted = sum(copy.count for copy in self.copies)
        found = sum(piece.copy.count for window in result for piece in window.pieces)
        if wanted != found:
            raise WeightSyncError(
                f"expected sources of {wanted} elements that this rank needs, got {found} (a source must not split an element)"
            )
        return result


def target_view(parameters: Sequence[Tensor], copy: Copy) -> Tensor:
    """The elements that a copy writes: [rows, cols]."""
    parameter = parameters[copy.parameter]
    return parameter.as_strided((copy.rows, copy.cols), (copy.target_stride, copy.target_step), parameter.storage_offset() + copy.target)


def source_view(data: Tensor, first_byte: int, copy: Copy, dtype: torch.dtype) -> Tensor:
    """The elements that a copy reads: [rows, cols].

    Args:
        data: [n] uint8, aligned to the dtype.
        first_byte: of the copy's first element, counted from `data`'s first.
        copy: whose source.
        dtype: of the elements.
    """
    size = dtype.itemsize
    typed = data[: data.numel() // size * size].view(dtype)
    return typed.as_strided((copy.rows, copy.cols), (copy.stride, 1), typed.storage_offset() + first_byte // size)


def recurring(view: Tensor, counts: Sequence[int], steps: Sequence[int]) -> Tensor:
    """A view's elements as often as `counts` say, so many elements behind each other as `steps` say: [*counts, *shape of the view]."""
    return view.as_strided((*counts, *view.shape), (*steps, *view.stride()), view.storage_offset()) if counts else view
