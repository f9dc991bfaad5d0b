"""Lossless changes between two versions: which elements have another bit pattern, and by how much, in compressed byte planes.

An Adam step at a learning rate of 1e-6 moves few of the bfloat16 parameters to a neighbouring value, so a step is a short
list of positions and small numbers. Elements are unsigned integers here (bfloat16, float16, float32 and all others alike): NaNs,
signed zeros and subnormals come through as they are. A tensor is cut into blocks that stand for themselves:

    gaps    positions of the changed elements as the number of unchanged ones before each of them, uint32
    steps   new bits - old bits mod 2^n, zigzag (+1 -> 2, -1 -> 1), so that small steps have zeros in their upper bytes

Each is split into byte planes, an all-zero plane is left out, and each other one is a zstd frame of its own. A block in which more
than half has changed has no gaps but a step for every element; one that would not be smaller than its bytes has the bytes.
On the wire a block is its header's length (uint32, little-endian), the header (MessagePack), and the planes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import WeightSyncError
from streamrl.tensors.digest import MASK, scattered_digest, tensor_digest
from streamrl.weights.protocol import Changed

BLOCK_ELEMENTS = 1 << 21
"""2 Mi elements: enough work for a thread, and temporary arrays of a few megabytes."""
LEVEL = 1
"""Of zstd: entropy coding is all that these planes leave to do. Levels 3 to 15 took 3 to 400 times as long for more bytes, not fewer."""
GAP_BYTES = 4
LENGTH_BYTES = 4


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a block holds: `changed` of the elements `first .. first + count` of a tensor, each of `item` bytes."""

    name: str
    item: int
    first: int
    count: int
    changed: int
    how: Literal["sparse", "dense", "raw"]
    planes: tuple[int, ...]
    """Compressed bytes of each plane, those of the gaps first; 0: the plane is zero."""


class Block(msgspec.Struct, frozen=True):
    """A block as it was read; `payload` holds its planes or its bytes."""

    header: Header
    payload: memoryview


def encode_block(name: str, item: int, first: int, old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> bytes:
    """The block that makes `new` of `old`; empty if they are equal.

    Args:
        name: of the tensor.
        item: bytes of an element: 1, 2, 4 or 8.
        first: index of the first element in the whole tensor.
        old: [count * item] uint8, at most `BLOCK_ELEMENTS` elements.
        new: the same range of the newer version.
    """
    before, after = old.view(f"<u{item}"), new.view(f"<u{item}")
    differs = before != after
    changed = int(np.count_nonzero(differs))
    if not changed:
        return b""
    count = len(after)
    if 2 * changed > count:
        how, planes = "dense", _planes(_zigzag(after - before))
    else:
        positions = np.flatnonzero(differs)
        how, planes = "sparse", _sparse(positions, before[positions], after[positions])
    if sum(map(len, planes)) >= len(new):
        return _block(Header(name, item, first, count, changed, "raw", ()), [new.tobytes()])
    return _block(Header(name, item, first, count, changed, how, tuple(map(len, planes))), planes)


def encode_changed(name: str, item: int, first: int, count: int, changed: Changed) -> bytes | None:
    """As `encode_block`, of a block whose changed elements are known; None where it takes all of its elements to encode it.

    Args:
        name: of the tensor.
        item: bytes of an element.
        first: index of the block's first element in the whole tensor.
        count: elements of the block.
        changed: in it.
    """
    number = len(changed.positions)
    if not number:
        return b""
    if 2 * number > count:
        return None
    planes = _sparse(*changed)
    if sum(map(len, planes)) >= count * item:
        return None
    return _block(Header(name, item, first, count, number, "sparse", tuple(map(len, planes))), planes)


def _sparse(positions: npt.NDArray[np.int64], old: npt.NDArray[np.unsignedinteger], new: npt.NDArray[np.unsignedinteger]) -> list[bytes]:
    gaps = np.diff(positions, prepend=-1)
    gaps -= 1
    return [*_planes(gaps.astype("<u4")), *_planes(_zigzag(new - old))]


def _block(header: Header, planes: Sequence[bytes]) -> bytes:
    text = msgspec.msgpack.encode(header)
    return b"".join([len(text).to_bytes(LENGTH_BYTES, "little"), text, *planes])


def read_blocks(data: memoryview) -> Iterator[Block]:
    """The blocks of a part; raises WeightSyncError when it is no sequence of whole blocks."""
    position = 0
    while position < len(data):
        body = position + LENGTH_BYTES + int.from_bytes(data[position : position + LENGTH_BYTES], "little")
        try:
            header = msgspec.msgpack.decode(data[position + LENGTH_BYTES : body], type=Header)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WeightSyncError(f"expected the header of a block of changes at byte {position}, got none: {error}") from error
        _check(header)
        position = body + (header.count * header.item if header.how == "raw" else sum(header.planes))
        if position > len(data):
            raise WeightSyncError(f"expected {position - body} bytes for a block of {header.name!r}, got {len(data) - body}")
        yield Block(header, data[body:position])


def apply_block(block: Block, tensor: npt.NDArray[np.uint8]) -> int:
    """Turn a block's elements of `tensor` into the newer ones, in place.

    Args:
        block: as read.
        tensor: [nbytes] uint8, the whole tensor.

    Returns:
        What the change adds to the tensor's digest, mod 2^64.

    Raises:
        WeightSyncError: the block does not fit the tensor, or its planes do not hold what the header says.
    """
    header = block.header
    if (header.first + header.count) * header.item > len(tensor) or len(tensor) % header.item:
        raise WeightSyncError(
            f"tensor {header.name!r}: expected changes within its {len(tensor)} bytes, got elements {header.first} to "
            f"{header.first + header.count} of {header.item} bytes",
            tensor=header.name,
            held=len(tensor),
        )
    flat = tensor[header.first * header.item : (header.first + header.count) * header.item]
    bits = flat.view(f"<u{header.item}")
    if header.how == "sparse":
        positions = np.cumsum(_joined(block, 0, GAP_BYTES), dtype=np.int64)
        positions += np.arange(header.changed)
        if header.changed and positions[-1] >= header.count:
            raise WeightSyncError(
                f"tensor {header.name!r}: expected changes within {header.count} elements, got one at {positions[-1]}",
                tensor=header.name,
                position=int(positions[-1]),
            )
        old = bits[positions]
        new = old + _unzigzag(_joined(block, GAP_BYTES, header.item))
        bits[positions] = new
        positions += header.first
        return (scattered_digest(new, positions) - scattered_digest(old, positions)) & MASK
    before = tensor_digest(flat, header.item, header.first)
    if header.how == "raw":
        flat[:] = np.frombuffer(block.payload, np.uint8)
    else:
        bits += _unzigzag(_joined(block, 0, header.item))
    return (tensor_digest(flat, header.item, header.first) - before) & MASK


def _check(header: Header) -> None:
    """Raise WeightSyncError for numbers that no encoder writes, before anything is allocated for them."""
    planes = {"sparse": GAP_BYTES + header.item, "dense": header.item, "raw": 0}[header.how]
    fits = header.item in (1, 2, 4, 8) and header.first >= 0 and 0 < header.count <= BLOCK_ELEMENTS
    if not fits or not 0 < header.changed <= header.count or len(header.planes) != planes or min(header.planes, default=0) < 0:
        raise WeightSyncError(f"expected a block of changes of {header.name!r} that adds up, got {header}", header=str(header))


def _zigzag(steps: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    one, top = steps.dtype.type(1), steps.dtype.type(8 * steps.itemsize - 1)
    return (steps << one) ^ (steps.dtype.type(0) - (steps >> top))


def _unzigzag(coded: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    one = coded.dtype.type(1)
    return (coded >> one) ^ (coded.dtype.type(0) - (coded & one))


def _planes(values: npt.NDArray[np.unsignedinteger]) -> list[bytes]:
    """The compressed byte planes of `values`, the lowest bytes first; empty for a plane of zeros."""
    import pyarrow as pa  # 25 MB, which a supervisor need not have

    codec = pa.Codec("zstd", compression_level=LEVEL)
    columns = values.view(np.uint8).reshape(len(values), values.itemsize)
    return [codec.compress(np.ascontiguousarray(plane), asbytes=True) if plane.any() else b"" for plane in columns.T]


def _joined(block: Block, index: int, width: int) -> npt.NDArray[np.unsignedinteger]:
    """The values whose `width` planes begin at plane `index`."""
    import pyarrow as pa

    header = block.header
    count = header.count if header.how == "dense" else header.changed
    columns = np.zeros((count, width), np.uint8)
    codec = pa.Codec("zstd")
    start = sum(header.planes[:index])
    for plane, nbytes in enumerate(header.planes[index : index + width]):
        if nbytes:
            try:
                columns[:, plane] = np.frombuffer(
                    codec.decompress(block.payload[start : start + nbytes], decompressed_size=count), np.uint8
                )
            except (pa.ArrowException, OSError, ValueError) as error:
                raise WeightSyncError(
                    f"tensor {header.name!r}: a plane of {nbytes} bytes does not unpack to {count}: {error}",
                    tensor=header.name,
                    plane=nbytes,
                ) from error
        start += nbytes
    return columns.reshape(-1).view(f"<u{width}")
