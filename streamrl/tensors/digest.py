"""Parameter digests: independent of sharding, computed in one pass, numpy only.

digest(tensor) = sum over elements i of mix64(bits_i + (i + 1) * gamma) mod 2^64

`i` is the element's index in the whole tensor in C order, `bits_i` its bytes as a little-endian unsigned integer and
mix64 the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014). A sum does not depend on order, so ranks digest
their own slices and the partial sums add up. It guards against accidents (a lost write, a wrong slice, one bit of
rounding), not against somebody who looks for collisions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from streamrl.errors import SchemaError

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
# 16 Ki elements: two uint64 buffers of 128 KiB stay in the second-level cache.
BLOCK = 1 << 14
WORD_BYTES = 8


def tensor_digest(data: npt.NDArray[np.uint8], itemsize: int, start: int = 0) -> int:
    """Digest of contiguous elements: the whole tensor, or a part whose sums add up mod 2^64.

    Args:
        data: [n * itemsize] uint8, the elements' little-endian bytes in C order.
        itemsize: bytes of an element: 1, 2, 4 or 8.
        start: index of the first element in the whole tensor.

    Returns:
        The (partial) sum, 0 <= value < 2^64; 0 for no elements.

    Example:
        >>> data = np.arange(8, dtype=np.uint8)  # four elements of two bytes
        >>> parts = tensor_digest(data[:2], 2) + tensor_digest(data[2:], 2, start=1)
        >>> parts & MASK == tensor_digest(data, 2)
        True

    Raises:
        SchemaError: the bytes are no whole number of elements.
    """
    bits = _elements(data, itemsize)
    size = min(len(bits), BLOCK)
    offsets = np.arange(1, size + 1, dtype=np.uint64)
    offsets *= np.uint64(GAMMA)
    work = np.empty(size, np.uint64)
    scratch = np.empty(size, np.uint64)
    total = 0
    for first in range(0, len(bits), BLOCK):
        part = bits[first : first + BLOCK]
        z, spare = work[: len(part)], scratch[: len(part)]
        np.add(part, offsets[: len(part)], out=z)
        z += np.uint64(((start + first) * GAMMA) & MASK)
        total += _mixed_sum(z, spare)
    return total & MASK


def scattered_digest(bits: npt.NDArray[np.unsignedinteger], indices: npt.NDArray[np.int64]) -> int:
    """Partial digest of single elements.

    Args:
        bits: [n] unsigned, the elements' little-endian bytes as an integer each.
        indices: [n] int64, their indices in the whole tensor, in any order.

    Returns:
        The partial sum, 0 <= value < 2^64. What a change adds to a tensor's digest is that of the new elements less that of the old ones.
    """
    total = 0
    for first in range(0, len(bits), BLOCK):
        z = indices[first : first + BLOCK].astype(np.uint64)
        z += np.uint64(1)
        z *= np.uint64(GAMMA)
        z += bits[first : first + BLOCK]
        total += _mixed_sum(z, np.empty_like(z))
    return total & MASK


def slice_digest(
    data: npt.NDArray[np.uint8],
    itemsize: int,
    global_shape: Sequence[int],
    offset: Sequence[int],
    shape: Sequence[int],
) -> int:
    """Partial digest of a rectangular slice of a tensor; the slices' values add up mod 2^64 to the tensor's digest.

    Args:
        data: [prod(shape) * itemsize] uint8, the slice's elements in C order.
        itemsize: bytes of an element.
        global_shape: shape of the whole tensor.
        offset: index of the slice's first element in each dimension; empty means 0 everywhere.
        shape: shape of the slice.

    Raises:
        SchemaError: the slice does not lie in the tensor, or the bytes are not those of `shape`.
    """
    bits = _elements(data, itemsize)
    indices = slice_indices(global_shape, offset, shape)
    if len(indices) != len(bits):
        raise SchemaError(f"expected {len(indices)} elements for a slice of shape {tuple(shape)}, got {len(bits)}")
    if len(indices) and int(indices[-1] - indices[0]) == len(indices) - 1:
        return tensor_digest(data, itemsize, int(indices[0]))
    total = 0
    for first in range(0, len(bits), BLOCK):
        z = indices[first : first + BLOCK]
        z += np.uint64(1)
        z *= np.uint64(GAMMA)
        np.add(z, bits[first : first + BLOCK], out=z)
        total += _mixed_sum(z, np.empty_like(z))
    return total & MASK


def as_words(
    itemsize: int, global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """The same slice counted in words of 8 bytes: shape of the whole, offset, shape; None where words would be cut.

    The digest of a tensor's words says as much about its bytes as that of its elements, for a fraction of the work: it is what engines
    check a version by. It is another number, and independent of sharding only over slices of whole words.

    Example, of two-byte elements, four to a word: rows 2 and 3 of [4, 6] are 12 elements from element 12 on, that is 3 words from word 3
    on of 6; one row alone, 6 elements, would cut a word.

        >>> as_words(2, (4, 6), (2, 0), (2, 6))
        ((6,), (3,), (3,))
        >>> as_words(2, (4, 6), (1, 0), (1, 6)) is None
        True
    """
    per_word = WORD_BYTES // itemsize
    begin = tuple(offset) or (0,) * len(global_shape)
    total, count = math.prod(global_shape), math.prod(shape)
    if tuple(shape[1:]) == tuple(global_shape[1:]) and not any(begin[1:]):
        first = begin[0] * math.prod(global_shape[1:]) if begin else 0
        if total % per_word or first % per_word or count % per_word:
            return None
        return (total // per_word,), (first // per_word,), (count // per_word,)
    if global_shape[-1] % per_word or begin[-1] % per_word or shape[-1] % per_word:
        return None
    return (
        (*global_shape[:-1], global_shape[-1] // per_word),
        (*begin[:-1], begin[-1] // per_word),
        (*shape[:-1], shape[-1] // per_word),
    )


def slice_indices(global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Index in the whole tensor of every element of a slice, in the slice's C order: [prod(shape)] uint64.

    Built dimension by dimension: the index so far times the dimension's size, plus the position in it.

        >>> slice_indices((3, 4), (1, 2), (2, 2)).tolist()  # rows 1 and 2, columns 2 and 3: 1 * 4 + 2 = 6, ...
        [6, 7, 10, 11]

    Raises:
        SchemaError: the slice does not lie in the tensor.
    """
    begin = tuple(offset) or (0,) * len(global_shape)
    fits = len(begin) == len(shape) == len(global_shape)
    if not fits or any(b < 0 or b + n > g for b, n, g in zip(begin, shape, global_shape, strict=True)):
        raise SchemaError(
            f"expected a slice within shape {tuple(global_shape)}, got offset {begin} and shape {tuple(shape)}",
            shape=tuple(global_shape),
            offset=tuple(begin),
        )
    indices = np.zeros(1, np.uint64)
    for size, first, count in zip(global_shape, begin, shape, strict=True):
        axis = np.arange(first, first + count, dtype=np.uint64)
        indices = (indices[:, None] * np.uint64(size) + axis[None, :]).ravel()
    return indices


def digest_text(value: int) -> str:
    """16 hex digits of a tensor's digest."""
    return f"{value & MASK:016x}"


def digest_texts(digests: Mapping[str, int]) -> dict[str, str]:
    """As `digest_text`, of many at once: a mixture of experts has tens of thousands of tensors."""
    text = np.array([value & MASK for value in digests.values()], ">u8").tobytes().hex()
    return {name: text[first : first + 16] for name, first in zip(digests, range(0, len(text), 16), strict=True)}


def combine(digests: Mapping[str, int]) -> str:
    """One digest of named tensors: 16 hex digits, independent of the mapping's order."""
    return combine_texts(digest_texts(digests))


def combine_texts(texts: Mapping[str, str]) -> str:
    """As `combine`, of digests that are texts already."""
    lines = "".join([f"{name}\0{texts[name]}\n" for name in sorted(texts)])
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _elements(data: npt.NDArray[np.uint8], itemsize: int) -> npt.NDArray[np.unsignedinteger]:
    if itemsize not in (1, 2, 4, 8):
        raise SchemaError(f"expected elements of 1, 2, 4 or 8 bytes, got {itemsize}", itemsize=itemsize)
    if data.dtype != np.uint8 or data.ndim != 1 or data.nbytes % itemsize:
        raise SchemaError(
            f"expected a flat uint8 array of {itemsize}-byte elements, got {data.dtype} of shape {data.shape}",
            dtype=str(data.dtype),
            shape=data.shape,
        )
    return data.view(f"<u{itemsize}")


def _mixed_sum(z: npt.NDArray[np.uint64], spare: npt.NDArray[np.uint64]) -> int:
    """Sum of splitmix64's finaliser over `z`, which is overwritten; `spare` is scratch of the same length."""
    np.right_shift(z, np.uint64(30), out=spare)
    z ^= spare
    z *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(z, np.uint64(27), out=spare)
    z ^= spare
    z *= np.uint64(0x94D049BB133111EB)
    np.right_shift(z, np.uint64(31), out=spare)
    z ^= spare
    return int(np.add.reduce(z))
