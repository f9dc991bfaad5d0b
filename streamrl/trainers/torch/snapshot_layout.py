"""What a snapshot has of each parameter, where it lies in a buffer, and in which order it is copied there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.tensors.concatenation import aligned, lay_out
from streamrl.tensors.digest import WORD_BYTES, as_words

LARGE_BYTES = 4 << 20
"""Tensors from this size on are copied by calls of their own, which move a GPU's memory faster than one kernel over all of them does; for
smaller ones the calls would take longer than the copies."""
BUCKET_BYTES = 1 << 30
"""Bytes that are copied, in 0.6 ms of an H200, before their readers may begin; a larger tensor is a bucket by itself."""


class Published(NamedTuple):
    """What a snapshot has of one parameter."""

    name: str
    held: Tensor
    """What is copied."""
    dtype: torch.dtype
    """That it is published in."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...] = ()
    """Index in it of the first element that is held, in each dimension; empty: 0 everywhere."""

    @property
    def nbytes(self) -> int:
        """Of what is published."""
        return self.held.numel() * self.dtype.itemsize


class Place(NamedTuple):
    """What does not change from one version to the next of what a snapshot has of a parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...]
    own: tuple[int, ...]
    """Shape of what is held."""
    start: int
    """First byte in the buffer."""
    nbytes: int
    item: int
    asked: Mapping[int, tuple[tuple[int, ...], ...]]
    """Shape of the whole, offset and shape of what is held, by the bytes of what they count: elements, and words if there are any."""


class Bucket(NamedTuple):
    """Parameters that are copied one after the other, by their index: large ones each, small ones together."""

    large: list[int]
    small: list[int]
    end: int
    """In the buffer."""


class Layout:
    """Where the parameters lie in a buffer, and the buckets they are copied in, which follow each other as they lie there."""

    def __init__(self, published: Sequence[Published]) -> None:
        self.published = published
        starts, self.nbytes = lay_out({one.name: one.nbytes for one in published})
        self.places = [_place(one, starts[one.name]) for one in published]
        self.marks = aligned(self.nbytes)
        """First byte of the buckets' marks."""
        self.buckets: list[Bucket] = []
        first = 0
        for index in sorted(range(len(published)), key=lambda index: self.places[index].start):
            start, nbytes = self.places[index].start, self.places[index].nbytes
            if not self.buckets or (nbytes and start + nbytes - first > BUCKET_BYTES):
                if self.buckets:
                    self.buckets[-1] = self.buckets[-1]._replace(end=start)
                self.buckets.append(Bucket([], [], self.nbytes))
                first = start
            large = nbytes >= LARGE_BYTES and published[index].held.is_contiguous()
            (self.buckets[-1].large if large else self.buckets[-1].small).append(index)


def _place(one: Published, start: int) -> Place:
    item, own = one.dtype.itemsize, tuple(one.held.shape)
    words = as_words(item, one.shape, one.offset, own)
    asked = ({} if words is None else {WORD_BYTES: words}) | {item: (one.shape, one.offset or (0,) * len(own), own)}
    return Place(one.name, str(one.dtype).removeprefix("torch."), one.shape, one.offset, own, start, one.nbytes, item, asked)
