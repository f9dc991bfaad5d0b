"""Where the tensors of a version lie in its bytes: in order of name, each at a multiple of `ALIGNMENT`, zeros between them."""

from __future__ import annotations

from collections.abc import Mapping

ALIGNMENT = 64
"""Bytes; a cache line, and enough for any dtype to be viewed in place."""


def aligned(offset: int) -> int:
    """The first multiple of `ALIGNMENT` that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def lay_out(nbytes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """First byte of each tensor, in order of name, and the bytes of all.

    Args:
        nbytes: bytes of each tensor by name.
    """
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(nbytes):
        starts[name] = aligned(end)
        end = starts[name] + nbytes[name]
    return starts, end
