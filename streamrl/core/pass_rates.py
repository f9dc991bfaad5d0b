"""What n samples of each of many problems say: mean, pass@k, majority of k, and how sure that is. Plain functions, in float64.

Shapes: P problems. A problem of which too few samples have answered for a k has no value there (NaN), and is not in the mean over problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from math import comb

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

MOST_VOTERS = 16
"""Up to so many samples the majority of k is computed for k = 2, 4, ..., beyond for all of them alone: ways to choose grow too fast."""
_DRAWS = 1000
_LEVEL = 0.95


class Estimate(msgspec.Struct, frozen=True):
    """A mean over problems with its bootstrap interval of 95 %."""

    value: float
    low: float
    high: float
    problems: int
    """How many have a value."""


def powers(n: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to n."""
    return tuple(1 << bit for bit in range(n.bit_length()))


def pass_at(answered_P: Sequence[int], correct_P: Sequence[int], k: int) -> Floats:
    """The unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k), of each problem (arXiv 2107.03374, equation 1).

    Computed as 1 - prod over i = n - c + 1 .. n of (1 - k / i), in which no binomial overflows.

    Args:
        answered_P: n, samples that have a reward.
        correct_P: c, those of them that are right; 0 <= c <= n.
        k: at least 1.

    Returns:
        float64 [P]; NaN where n < k.
    """
    n, c = np.asarray(answered_P, np.int64), np.asarray(correct_P, np.int64)
    if k < 1 or n.shape != c.shape or (c < 0).any() or (c > n).any():
        raise ValueError(f"expected k >= 1 and 0 <= correct <= answered for each problem, got k = {k}")
    none_right = np.ones(n.shape)
    for step in range(int(c.max(initial=0))):
        counted = step < c
        factor = 1 - k / np.where(counted, n - step, k + 1)
        none_right = np.where(counted, none_right * np.maximum(factor, 0), none_right)
    return np.where(n < k, np.nan, 1 - none_right)


def majority_ks(n: int) -> tuple[int, ...]:
    """For which k the majority of n samples is computed."""
    return tuple(sorted({*powers(n)[1:], n} - {1})) if n <= MOST_VOTERS else (n,)


def majority_at(answers: Sequence[Hashable | None], rewards: Sequence[float], ks: Sequence[int]) -> list[float]:
    """The expected reward of the answer that most of k samples give, over all ways to choose k of the n samples: maj@k, exactly.

    Answers that equally many give win equally often. A sample without an answer (None) is chosen as any other and votes for nothing; where
    nobody votes the reward is 0. An answer's reward is the mean of its samples'. Cost grows with the number of partitions of n, see
    `MOST_VOTERS`; for k = n it is linear.

    Args:
        answers: of the samples of one problem.
        rewards: of the same, finite.
        ks: each at least 1.

    Returns:
        One for each k; NaN where n < k.
    """
    # By answer: how many samples gave it, and the sum of their rewards.
    votes: dict[Hashable, int] = {}
    totals: dict[Hashable, float] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + 1
            totals[answer] = totals.get(answer, 0.0) + reward
    sizes, silent = tuple(sorted(votes.values())), len(answers) - sum(votes.values())

    def worth(k: int) -> float:
        if not 1 <= k <= len(answers):
            return float("nan")
        chances = _chances(sizes, silent, k)
        return float(sum(chances[size] * totals[answer] / size for answer, size in votes.items()))

    return [worth(k) for k in ks]


@lru_cache(maxsize=1 << 14)
def _chances(sizes: tuple[int, ...], silent: int, k: int) -> Mapping[int, float]:
    """By size, how likely an answer that so many samples give wins among k of all of them."""
    n = sum(sizes) + silent
    if k == n:
        most = max(sizes, default=0)
        return {size: (size == most) / sizes.count(most) for size in set(sizes)}
    found: dict[int, float] = {}
    for size in set(sizes):
        others = list(sizes)
        others.remove(size)
        ways = sum(comb(size, count) * _won(others, silent, k - count, count) for count in range(1, min(size, k) + 1))
        found[size] = ways / comb(n, k)
    return found


def _won(others: Sequence[int], silent: int, left: int, count: int) -> float:
    """Ways to choose `left` more so that no other answer has more than `count`; those with t that have as many count 1 / (1 + t)."""
    ways = {(used, 0): comb(silent, used) for used in range(min(silent, left) + 1)}
    for size in others:
        after = Counter[tuple[int, int]]()
        for (used, ties), number in ways.items():
            for chosen in range(min(size, count, left - used) + 1):
                after[used + chosen, ties + (chosen == count)] += number * comb(size, chosen)
        ways = after
    return sum(number / (1 + ties) for (used, ties), number in ways.items() if used == left)


def estimates(values_PS: Floats, *, seed: int = 0) -> list[Estimate | None]:
    """The mean of each column over the problems that have a value, with the 2.5th and 97.5th percentile of means of problems drawn anew.

    The same draws serve all columns (a paired comparison is one), and the same seed gives the same interval.

    Args:
        values_PS: float64 [P, S], S statistics of P problems; NaN: the problem has no value.
        seed: of the draws.

    Returns:
        One for each column; None where no problem has a value.
    """
    num_problems, num_columns = values_PS.shape
    there_PS = np.isfinite(values_PS)
    filled_PS = np.where(there_PS, values_PS, 0.0)
    # [P, 2 S]: a value and whether it is there, so that one product gives sums and counts.
    both = np.hstack([filled_PS, there_PS])
    generator = np.random.default_rng(seed)
    means_DS = np.full((_DRAWS if num_problems else 0, num_columns), np.nan)
    for drawn in range(len(means_DS)):
        times_P = np.bincount(generator.integers(0, num_problems, num_problems), minlength=num_problems)
        sums = times_P @ both
        with np.errstate(invalid="ignore"):
            means_DS[drawn] = sums[:num_columns] / sums[num_columns:]
    found: list[Estimate | None] = []
    for column in range(num_columns):
        count = int(there_PS[:, column].sum())
        if not count:
            found.append(None)
            continue
        means = means_DS[:, column]
        low, high = np.quantile(means[np.isfinite(means)], [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
        found.append(Estimate(float(filled_PS[:, column].sum() / count), float(low), float(high), count))
    return found
