"""Which rank trains which groups: costs of sequences, and number partitioning. Pure, deterministic, numpy only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from streamrl.core.batches import TrainBatch
from streamrl.errors import TrainingError

Indices = npt.NDArray[np.int64]
Length = TypeVar("Length", int, npt.NDArray[np.int64])


def sequence_cost(length: Length, width: int) -> Length:
    """Work of a forward and backward pass over one sequence, up to a factor that is the same for all.

    A transformer layer of width h multiplies about 12 h^2 numbers a token in its linear maps and h numbers a pair of tokens in each of
    the two attention products: n (12 h^2 + 2 h n), so n (6 h + n) after division by 2 h.

    Args:
        length: tokens n, one number or an int64 array.
        width: hidden size h.
    """
    return length * (6 * width + length)


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Split items into `parts` sets of nearly equal sums by the largest differencing method (Karmarkar and Karp 1982, k-way).

    Starts with every item in a partition of its own, whose other sets are empty. The two partitions with the widest spread between
    their heaviest and lightest set are merged, heaviest set with lightest, until one is left. Ties go to the item that comes first, so
    equal arguments give equal sets.

    Args:
        costs: cost of each item, at least 0.
        parts: number of sets, at least 1.

    Returns:
        `parts` lists of item numbers, each ascending; some are empty when there are fewer items than parts.

    Raises:
        TrainingError: no parts, or a cost that is negative or not finite.
    """
    if parts < 1 or any(not 0 <= cost < float("inf") for cost in costs):
        raise TrainingError(f"expected at least 1 part and finite costs of at least 0, got {parts} parts and costs {list(costs)[:8]}")
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, item in enumerate(order):
        sets = [(float(costs[item]), [item]), *((0.0, list[int]()) for _ in range(parts - 1))]
        heap.append((-_spread(sets), number, sets))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, two = heapq.heappop(heap)
        # Heaviest first in one, lightest first in the other; the sets' own first item breaks ties.
        two.reverse()
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, two, strict=True)]
        merged.sort(key=lambda chosen: (-chosen[0], min(chosen[1], default=len(costs))))
        heapq.heappush(heap, (-_spread(merged), number, merged))
        number += 1
    sets = heap[0][2] if heap else [(0.0, []) for _ in range(parts)]
    return [sorted(items) for _, items in sets]


def split_ranks(batch: TrainBatch, samples: Indices, ranks: int, *, width: int = 1024) -> list[Indices]:
    """Samples of each data-parallel rank: whole groups, so that they share their prompts, balanced by `sequence_cost`.

    Args:
        batch: the whole batch.
        samples: indices of the samples to share out, ascending.
        ranks: how many ranks.
        width: hidden size of the model.

    Returns:
        Ascending indices for each rank; every one of `samples` in exactly one of them.
    """
    if ranks == 1:
        return [samples]
    tasks, group = np.unique(batch.tasks[samples], return_inverse=True)
    group = group.reshape(-1)
    costs = np.zeros(len(tasks), np.int64)
    np.add.at(costs, group, sequence_cost(batch.lengths[samples], width))
    rank_of = np.zeros(len(tasks), np.int64)
    for rank, groups in enumerate(karmarkar_karp(costs.tolist(), ranks)):
        rank_of[groups] = rank
    return [samples[rank_of[group] == rank] for rank in range(ranks)]


def _spread(sets: list[tuple[float, list[int]]]) -> float:
    """Heaviest minus lightest; the sets are sorted."""
    return sets[0][0] - sets[-1][0]
