"""How a version's bytes reach a rank's parameters, as plain numbers: recorded once, cut into windows, replayed for every version."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import msgspec

from streamrl.engines.live_swap.messages import Region
from streamrl.tensors.digest import WORD_BYTES

WINDOW_BYTES = 32 << 20
"""Bytes of a file copied between two looks at the pace: about 0.6 ms over PCIe."""
DEVICE_WINDOW_BYTES = 512 << 20
"""Bytes of another GPU copied between two looks at the pace: 1.4 ms over NVLink, a tenth of which forward passes feel."""
WINDOW_COPIES = 512
"""Copies in a window: a list that long is read in about 0.1 ms, and the interpreter is held meanwhile."""


class Copy(msgspec.Struct, frozen=True):
    """`rows` rows of `cols` elements, from a tensor of the version to a parameter of the model.

    Within a row source elements are consecutive. All offsets and strides count elements.

    Example: k_proj [2, 4] goes into rows 6 and 7 of a fused qkv [8, 4] as one run of 8 elements, as both are contiguous; columns 4 .. 7 of
    a w1 [3, 8] into a rank's half [3, 4] are 3 rows of 4 elements, 8 apart in the source and 4 apart in the parameter:

        >>> canonical(0, 0, (2, 4), (0, (4, 1)), (24, (4, 1)))
        Copy(tensor=0, start=0, stride=8, rows=1, cols=8, parameter=0, target=24, target_stride=8, target_step=1)
        >>> canonical(1, 1, (3, 4), (4, (8, 1)), (0, (4, 1)))
        Copy(tensor=1, start=4, stride=8, rows=3, cols=4, parameter=1, target=0, target_stride=4, target_step=1)
    """

    tensor: int
    """Index of the source tensor."""
    start: int
    """First element in the source tensor (C order)."""
    stride: int
    """From one row to the next in the source; `cols` if there is one row."""
    rows: int
    cols: int
    parameter: int
    """Index of the model's parameter."""
    target: int
    """First element, counted from the parameter's first."""
    target_stride: int
    """From one row to the next in the parameter."""
    target_step: int = 1
    """From one element of a row to the next in the parameter (a transposed parameter has another than 1)."""

    @property
    def count(self) -> int:
        """Elements."""
        return self.rows * self.cols

    def region(self) -> Region:
        """What the copy brings, whatever it is copied to."""
        return Region(self.tensor, self.start, self.rows, self.cols, self.stride)


class Fill(msgspec.Struct, frozen=True):
    """Padding: elements of a parameter that load_weights sets to a value. `place` says where (its source side means nothing)."""

    place: Copy
    value: float


class Piece(msgspec.Struct, frozen=True):
    """Part of a copy that lies in one source and one window."""

    copy: Copy
    region: int
    """Index of the region it belongs to."""
    source: int
    """Index of the source."""
    first_byte: int
    """Of its first element in the concatenation."""
    end_byte: int
    """After its last element in the concatenation."""
    itemsize: int


class Window(msgspec.Struct, frozen=True):
    """Pieces that are copied by one call, and the bytes of the concatenation that they lie in."""

    first_byte: int
    end_byte: int
    pieces: tuple[Piece, ...]

    @property
    def reads(self) -> tuple[tuple[int, int], ...]:
        """Index of each source that is read, and the end of what is read of it."""
        ends: dict[int, int] = {}
        for piece in self.pieces:
            ends[piece.source] = max(ends.get(piece.source, 0), piece.end_byte)
        return tuple(ends.items())

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return sum(piece.copy.count * piece.itemsize for piece in self.pieces)


def canonical(
    tensor: int,
    parameter: int,
    shape: Sequence[int],
    source: tuple[int, Sequence[int]],
    target: tuple[int, Sequence[int]],
) -> Copy | None:
    """A strided copy as rows of consecutive source elements; None if it is none.

    Args:
        tensor: index of the source tensor.
        parameter: index of the parameter.
        shape: of both views.
        source: offset and strides of the source view.
        target: offset and strides of the parameter's view.
    """
    dims = [(s, t, n) for n, s, t in zip(shape, source[1], target[1], strict=True) if n != 1]
    dims.sort(key=lambda dim: -dim[0])
    merged: list[tuple[int, int, int]] = []
    for stride, step, size in dims:
        if merged and merged[-1][0] == stride * size and merged[-1][1] == step * size:
            merged[-1] = (stride, step, merged[-1][2] * size)
        else:
            merged.append((stride, step, size))
    if not merged or merged[-1][0] != 1:
        merged.append((1, 1, 1))
    if len(merged) > 2:
        return None
    cols, step = merged[-1][2], merged[-1][1]
    if len(merged) == 1:
        return Copy(tensor, source[0], cols, 1, cols, parameter, target[0], cols * step, step)
    stride, target_stride, rows = merged[0]
    if stride < cols:
        return None
    return Copy(tensor, source[0], stride, rows, cols, parameter, target[0], target_stride, step)


def apart(one: Copy, other: Copy) -> bool:
    """Whether two copies certainly write to no element both.

    Example: in a parameter [2, 4] (rows 4 apart) columns 0 .. 1 and 2 .. 3 lie apart though their ranges 0 .. 5 and 2 .. 7 overlap.

        >>> left, right = Copy(0, 0, 2, 2, 2, 0, 0, 4), Copy(1, 0, 2, 2, 2, 0, 2, 4)
        >>> apart(left, right), apart(left, left)
        (True, False)
    """
    if one.parameter != other.parameter:
        return True
    if one.target_step != 1 or other.target_step != 1:
        return False
    low, high = max(one.target, other.target), min(_target_end(one), _target_end(other))
    if low >= high:
        return True
    strides = {copy.target_stride for copy in (one, other) if copy.rows > 1}
    if len(strides) != 1:
        return False
    (stride,) = strides
    columns = [(copy.target % stride, copy.target % stride + copy.cols) for copy in (one, other)]
    if any(end > stride for _, end in columns):
        return False
    rows = [(copy.target // stride, copy.target // stride + copy.rows) for copy in (one, other)]
    return any(a[1] <= b[0] or b[1] <= a[0] for a, b in (columns, rows))


def _target_end(copy: Copy) -> int:
    return copy.target + (copy.rows - 1) * copy.target_stride + copy.cols


def in_words(copy: Copy, item: int) -> Copy | None:
    """The same copy counted in words of 8 bytes, for digests; None where it cuts words of its tensor or its parameter.

    Args:
        copy: of elements.
        item: bytes of an element.
    """
    per_word = WORD_BYTES // item
    steps = (copy.stride, copy.target_stride) if copy.rows > 1 else ()
    if copy.target_step != 1 or any(count % per_word for count in (copy.start, copy.cols, copy.target, *steps)):
        return None
    return msgspec.structs.replace(
        copy,
        start=copy.start // per_word,
        cols=copy.cols // per_word,
        target=copy.target // per_word,
        stride=(copy.stride if steps else copy.cols) // per_word,
        target_stride=(copy.target_stride if steps else copy.cols) // per_word,
    )


def merge(copies: Sequence[Copy]) -> list[Copy]:
    """Fewer, larger copies: neighbours in one tensor that are neighbours in one parameter become one."""
    result: list[Copy] = []
    for copy in sorted(copies, key=lambda copy: (copy.tensor, copy.start)):
        last = result[-1] if result else None
        if (
            last is not None
            and last.rows == copy.rows == 1
            and (last.tensor, last.parameter) == (copy.tensor, copy.parameter)
            and last.start + last.cols == copy.start
            and last.target_step == copy.target_step == 1
            and last.target + last.cols == copy.target
        ):
            cols = last.cols + copy.cols
            result[-1] = msgspec.structs.replace(last, cols=cols, stride=cols, target_stride=cols)
        else:
            result.append(copy)
    return result


def cut(copy: Copy, first: int, end: int) -> Iterator[Copy]:
    """The parts of a copy whose source elements lie in `first .. end` of its tensor, in at most three rectangles.

    Example: of 3 rows of 4 elements that begin at 4, 12 and 20, elements 6 .. 22 hold the end of the first row, the second whole, and the
    beginning of the third.

        >>> copy = Copy(0, 4, 8, 3, 4, 0, 0, 4)
        >>> [(part.start, part.rows, part.cols, part.target) for part in cut(copy, 6, 22)]
        [(6, 1, 2, 2), (12, 1, 4, 4), (20, 1, 2, 8)]
    """
    if copy.rows == 1:
        low, high = max(first, copy.start), min(end, copy.start + copy.cols)
        if low < high:
            yield _columns(copy, 0, low - copy.start, high - copy.start)
        return
    # Rows that begin before `first` or end after `end` are cut; those between are taken whole.
    row = max(0, (first - copy.start) // copy.stride)
    while row < copy.rows:
        begin = copy.start + row * copy.stride
        if begin >= end:
            break
        low, high = max(0, first - begin), min(copy.cols, end - begin)
        if low == 0 and high == copy.cols:
            last = min(copy.rows, (end - copy.start - copy.cols) // copy.stride + 1)
            yield _rows(copy, row, last)
            row = last
            continue
        if low < high:
            yield _columns(copy, row, low, high)
        row += 1


def _rows(copy: Copy, first: int, end: int) -> Copy:
    if end - first == 1:
        return _columns(copy, first, 0, copy.cols)
    return msgspec.structs.replace(
        copy, rows=end - first, start=copy.start + first * copy.stride, target=copy.target + first * copy.target_stride
    )


def _columns(copy: Copy, row: int, first: int, end: int) -> Copy:
    cols = end - first
    return Copy(
        copy.tensor,
        copy.start + row * copy.stride + first,
        cols,
        1,
        cols,
        copy.parameter,
        copy.target + row * copy.target_stride + first * copy.target_step,
        cols * copy.target_step,
        copy.target_step,
    )


def windows(
    copies: Sequence[Copy],
    offsets: Sequence[int],
    itemsizes: Sequence[int],
    sources: Sequence[tuple[int, int]],
    window_bytes: int = WINDOW_BYTES,
    window_copies: int = WINDOW_COPIES,
) -> list[Window]:
    """Cut a plan to windows of at most `window_bytes` source bytes each, in the order of the concatenation.

    A window may have pieces of several sources: rows of two ranks lie in turn, tensor by tensor.

    Args:
        copies: the plan; a copy's index is its region's.
        offsets: first byte of each tensor in the concatenation.
        itemsizes: bytes of an element of each tensor.
        sources: first byte and end of each source in the concatenation, in order.
        window_bytes: bytes of source a window may span.
        window_copies: pieces that a window may have.
    """
    pieces: list[Piece] = []
    ends = [end for _, end in sources]
    for region, copy in enumerate(copies):
        item, base = itemsizes[copy.tensor], offsets[copy.tensor]
        low, high = base + copy.start * item, base + (copy.start + (copy.rows - 1) * copy.stride + copy.cols) * item
        for index in range(bisect.bisect_right(ends, low), len(sources)):
            first, end = sources[index]
            if first >= high:
                break
            for part in cut(copy, -(-(first - base) // item), (end - base) // item):
                pieces.extend(_narrow(part, region, index, base, item, window_bytes))
    pieces.sort(key=lambda piece: (piece.first_byte, piece.source))
    result: list[Window] = []
    group: list[Piece] = []
    low = high = 0
    for piece in pieces:
        if group and (max(high, piece.end_byte) - low > window_bytes or len(group) == window_copies):
            result.append(Window(low, high, tuple(group)))
            group = []
        if not group:
            low = high = piece.first_byte
        group.append(piece)
        high = max(high, piece.end_byte)
    if group:
        result.append(Window(low, high, tuple(group)))
    return result


def _narrow(copy: Copy, region: int, source: int, base: int, item: int, window_bytes: int) -> Iterator[Piece]:
    """Pieces of a copy that each span at most a window."""
    limit = max(1, window_bytes // item)
    if copy.rows > 1 and copy.cols <= limit:
        step = max(1, (limit - copy.cols) // copy.stride + 1)
        parts = [_rows(copy, first, min(copy.rows, first + step)) for first in range(0, copy.rows, step)]
    else:
        parts = [
            _columns(copy, row, first, min(copy.cols, first + limit)) for row in range(copy.rows) for first in range(0, copy.cols, limit)
        ]
    for part in parts:
        first = base + part.start * item
        end = first + ((part.rows - 1) * part.stride + part.cols) * item
        yield Piece(part, region, source, first, end, item)
