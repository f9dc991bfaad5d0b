"""Which source a task takes, and which place in that source: pure functions of the seed, the task and the segments that are on record.

A segment has weights. In each BLOCK of its tasks every source has the same number of them, in an order that depends on (seed, block): a
share that is kept closely, and no pattern that a batch could fall into. So the place of a task within its source is known without looking
at the tasks before it, however the weights have changed.

Weights follow versions, and versions do not follow from task numbers: how many groups were dropped decides. So the feeder records a new
segment when a grant's version has other weights, and it begins at the end of that grant: what was granted before keeps its weights.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from streamrl.core.seeds import mix64
from streamrl.data.order import permuted
from streamrl.schemas.control import MixtureSegment

BLOCK = 1000
"""Tasks over which shares are exact, to 1 in BLOCK; a weight above 0 has at least one of them."""


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Tasks of each source in a block: its share, rounded by largest remainders, and at least 1 for a weight above 0.

    Raises ValueError where no weight is above 0, one is below, or there are more sources than tasks.
    """
    total = sum(weights)
    if not 0 < total < float("inf") or min(weights) < 0 or len(weights) > BLOCK:
        raise ValueError(f"expected at most {BLOCK} weights of at least 0, one above it, got {weights}")
    exact = [weight / total * BLOCK for weight in weights]
    found = [max(int(share), int(weight > 0)) for share, weight in zip(exact, weights, strict=True)]
    while (short := BLOCK - sum(found)) != 0:
        step = 1 if short > 0 else -1
        # Who is furthest from its share; a source keeps its only task.
        open_ = [source for source, count in enumerate(found) if weights[source] > 0 and (step > 0 or count > 1)]
        chosen = max(open_, key=lambda source: (step * (exact[source] - found[source]), -source))
        found[chosen] += step
    return tuple(found)


def segment_of(segments: Sequence[MixtureSegment], task: int) -> MixtureSegment:
    """The segment that a task after the warm-up lies in."""
    return segments[max(0, bisect_right(segments, task, key=lambda segment: segment.first) - 1)]


def source_of(seed: int, segment: MixtureSegment, task: int) -> tuple[int, int]:
    """(source, place in that source) of a task of this segment."""
    block, at = divmod(task - segment.first, BLOCK)
    order, before = _block(mix64(mix64(seed) ^ segment.first), block, quotas(segment.weights))
    source = int(order[at])
    return source, _places(segment, block)[source] + int(before[at, source])


def places_at(seed: int, segment: MixtureSegment, task: int) -> tuple[int, ...]:
    """Tasks of each source before a task of this segment."""
    block, at = divmod(task - segment.first, BLOCK)
    _, before = _block(mix64(mix64(seed) ^ segment.first), block, quotas(segment.weights))
    return tuple(start + int(count) for start, count in zip(_places(segment, block), before[at], strict=True))


def extended(
    segments: tuple[MixtureSegment, ...], weights: tuple[float, ...], *, seed: int, version: int, granted: int
) -> tuple[MixtureSegment, ...]:
    """The segments once a grant of `version` has come, up to task `granted` after the warm-up: the same where its weights are in force.

    The first segment begins at task 0, each later one at the end of the grant that it was decided at.
    """
    if not segments:
        return (MixtureSegment(first=0, version=version, weights=weights, places=(0,) * len(weights)),)
    last = segments[-1]
    if last.weights == weights or version < last.version:
        return segments
    if granted <= last.first:  # nothing was granted since: no task has been issued by the last one
        return (*segments[:-1], replace(last, version=version, weights=weights))
    places = places_at(seed, last, granted)
    return (*segments, MixtureSegment(first=granted, version=version, weights=weights, places=places))


def _places(segment: MixtureSegment, block: int) -> list[int]:
    return [start + block * count for start, count in zip(segment.places, quotas(segment.weights), strict=True)]


@lru_cache(maxsize=64)
def _block(key: int, block: int, counts: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of one block: the source of each task, and [task, source] how many tasks of each source come before."""
    sources = np.repeat(np.arange(len(counts)), counts)
    of_block = mix64(key + block)
    order = sources[[permuted(of_block, place, BLOCK) for place in range(BLOCK)]]
    own = order[:, None] == np.arange(len(counts))
    return order, np.cumsum(own, axis=0) - own
