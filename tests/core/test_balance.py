"""Number partitioning against its definition and an exhaustive search, and what ranks get."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.core.balance import karmarkar_karp, sequence_cost, split_ranks
from streamrl.core.batches import TrainBatch
from streamrl.errors import TrainingError

MakeBatch = Callable[..., TrainBatch]
Costs = st.lists(st.integers(0, 1000), max_size=40)


def sums(costs: list[int], sets: list[list[int]]) -> list[int]:
    return [sum(costs[item] for item in items) for items in sets]


def test_the_textbook_example() -> None:
    """8, 7, 6, 5, 4: differencing leaves 2 (16 against 14), where the optimum is 15 against 15."""
    assert sorted(sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2))) == [14, 16]


@settings(deadline=None)
@given(costs=Costs, parts=st.integers(1, 6))
def test_every_item_is_in_one_set(costs: list[int], parts: int) -> None:
    sets = karmarkar_karp(costs, parts)
    assert len(sets) == parts
    assert sorted(item for items in sets for item in items) == list(range(len(costs)))
    assert all(items == sorted(items) for items in sets)
    assert sets == karmarkar_karp(costs, parts)
    # No set is heavier than the mean by more than the heaviest item: what any sensible greedy rule guarantees too.
    if costs:
        assert max(sums(costs, sets)) <= sum(costs) / parts + max(costs)


def differencing(costs: list[int], parts: int) -> list[list[int]]:
    """The definition, without a heap: every item starts in a partition of its own, and the two widest are merged."""

    def weight(chosen: list[int]) -> int:
        return sum(costs[item] for item in chosen)

    def heaviest_first(sets: list[list[int]]) -> list[list[int]]:
        return sorted(sets, key=lambda chosen: (-weight(chosen), min(chosen, default=len(costs))))

    order = sorted(range(len(costs)), key=lambda item: -costs[item])
    left = [[[item], *([] for _ in range(parts - 1))] for item in order]
    while len(left) > 1:
        widest = sorted(left, key=lambda sets: weight(sets[-1]) - weight(sets[0]))[:2]
        left = [sets for sets in left if not any(sets is one for one in widest)]
        left.append(heaviest_first([a + b for a, b in zip(widest[0], reversed(widest[1]), strict=True)]))
    return [sorted(chosen) for chosen in left[0]] if left else [[] for _ in range(parts)]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_it_is_the_largest_differencing_method(parts: int) -> None:
    """Small costs, so that many spreads are equal: then the partition made first goes first."""
    rng = np.random.default_rng(parts)
    for _ in range(150):
        costs = rng.integers(0, 8, parts * rng.integers(0, 6)).tolist()
        assert karmarkar_karp(costs, parts) == differencing(costs, parts)


def test_it_is_near_the_optimum_and_better_than_greedy() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(40):
        costs = rng.integers(1, 100, 9).tolist()
        best = min(
            max(sums(costs, [[i for i in range(9) if choice[i] == part] for part in range(2)])) for choice in product((0, 1), repeat=9)
        )
        ratios.append(max(sums(costs, karmarkar_karp(costs, 2))) / best)
    assert max(ratios) < 1.07
    assert np.mean(ratios) < 1.01
    lengths = rng.lognormal(6, 1, 256).astype(int).tolist()
    heaviest = [0] * 8
    for cost in sorted(lengths, reverse=True):
        heaviest[heaviest.index(min(heaviest))] += cost
    assert max(sums(lengths, karmarkar_karp(lengths, 8))) < max(heaviest)


@pytest.mark.parametrize(("costs", "parts"), [([1.0, -1.0], 2), ([float("nan")], 2), ([float("inf")], 2), ([1.0], 0)])
def test_what_cannot_be_split_is_refused(costs: list[float], parts: int) -> None:
    with pytest.raises(TrainingError):
        karmarkar_karp(costs, parts)


def test_attention_makes_long_sequences_dearer_than_their_tokens() -> None:
    assert sequence_cost(2000, 64) > 2 * sequence_cost(1000, 64)
    # One sequence of 6 h tokens costs as much in attention as in linear layers.
    assert sequence_cost(6 * 64, 64) == 2 * (6 * 64) * (6 * 64)
    assert sequence_cost(np.array([1, 2]), 1).tolist() == [7, 16]


def test_ranks_get_whole_groups_of_like_cost(make_batch: MakeBatch) -> None:
    lengths = [50, 3, 3, 40, 9, 5]
    batch = make_batch([{"prompt": [1], "answer": [2] * n, "task": t, "rollout": r} for t, n in enumerate(lengths) for r in range(2)])
    split = split_ranks(batch, np.arange(12), 2)
    assert sorted(np.concatenate(split).tolist()) == list(range(12))
    assert not set(batch.tasks[split[0]]) & set(batch.tasks[split[1]])
    assert sorted(int(batch.lengths[s].sum()) for s in split) == [114, 118]
    assert sorted(s.tolist() for s in split_ranks(batch, np.arange(2), 3)) == [[], [], [0, 1]]
    batch = make_batch([{"prompt": [1], "answer": [2] * n, "task": t} for t, n in enumerate([99] + [24] * 8)])
    assert min(len(s) for s in split_ranks(batch, np.arange(9), 2, width=4096)) > 1
    assert min(len(s) for s in split_ranks(batch, np.arange(9), 2, width=1)) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lengths=st.lists(st.integers(1, 4), min_size=2, max_size=10), ranks=st.integers(2, 3))
def test_ranks_are_balanced_by_the_costs_of_whole_groups(make_batch: MakeBatch, lengths: list[int], ranks: int) -> None:
    """With a width of 0 a sequence of n tokens costs n^2; samples 2 k and 2 k + 1 are a group."""
    batch = make_batch([{"prompt": [], "answer": [2] * n, "task": i // 2, "rollout": i % 2} for i, n in enumerate(lengths)])
    costs = [sum(n * n for n in lengths[first : first + 2]) for first in range(0, len(lengths), 2)]
    want = [[i for i in range(len(lengths)) if i // 2 in groups] for groups in karmarkar_karp(costs, ranks)]
    assert [own.tolist() for own in split_ranks(batch, np.arange(len(lengths)), ranks, width=0)] == want
