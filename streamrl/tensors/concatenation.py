"""Where the tensors of a version lie in its bytes: in order of name (`place_of`), each at a multiple of `ALIGNMENT`, zeros between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element, for the types that a version may have."""
_NUMBERS = re.compile(r"(\d+)", re.ASCII)
ALIGNMENT = 64
"""Bytes; a cache line, and enough for any dtype to be viewed in place."""


def aligned(offset: int) -> int:
    """The first multiple of `ALIGNMENT` that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=1 << 16)
def place_of(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return what names are ordered by: numbers in them by their value, so that layers and experts lie one after the other.

    >>> sorted(["experts.10.up", "experts.2.up", "experts.2.down", "a"], key=place_of)
    ['a', 'experts.2.down', 'experts.2.up', 'experts.10.up']
    """
    parts = _NUMBERS.split(name)
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts)), name  # "0" and "00" have one value


def lay_out(nbytes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """First byte of each tensor, in order of name, and the bytes of all.

    Args:
        nbytes: bytes of each tensor by name.
    """
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(nbytes, key=place_of):
        starts[name] = aligned(end)
        end = starts[name] + nbytes[name]
    return starts, end
