"""Histograms of answer lengths: counts between fixed geometric bounds, four to an octave, so that any two can be added and compared.

Bucket 0 holds answers without a token, bucket i > 0 those of 2^((i-1)/4) up to below 2^(i/4) tokens. Empty buckets at the end are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest

PER_OCTAVE = 4
MOST_BUCKETS = 1 + 32 * PER_OCTAVE
"""Answers of 2^32 tokens and more are in the last."""


def bucket(length: int) -> int:
    """The bucket of a length."""
    if length < 1:
        return 0
    return min(MOST_BUCKETS - 1, 1 + math.floor(PER_OCTAVE * math.log2(length)))


def edge(place: int) -> float:
    """Where a bucket begins."""
    return 2.0 ** ((place - 1) / PER_OCTAVE) if place else 0.0


def histogram(lengths: Iterable[int]) -> tuple[int, ...]:
    """Counts by bucket."""
    counts: list[int] = []
    for length in lengths:
        place = bucket(length)
        if place >= len(counts):
            counts += [0] * (place + 1 - len(counts))
        counts[place] += 1
    return tuple(counts)


def added(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The counts of both."""
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


def least(place: int) -> int:
    """The least whole length in a bucket or above it: between 1 and 8 some buckets hold none."""
    return math.ceil(edge(place))


def quantile(counts: Sequence[int], part: float) -> float:
    """A length that at least `part` of the answers do not exceed by more than their bucket's width: the least of the bucket; NaN of none.

    So it is a whole number of tokens, at most the true quantile and above 0.84 of it, and never more than the longest answer.
    """
    total = sum(counts)
    if not total:
        return math.nan
    return float(least(next(place for place, below in enumerate(accumulate(counts)) if below >= part * total and below)))


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Kolmogorov-Smirnov distance of two histograms, from 0 (alike) to 1: the most that their cumulative shares differ; NaN of none."""
    totals = sum(one), sum(other)
    if not all(totals):
        return math.nan
    below = zip(*(accumulate(pair) for pair in zip(*zip_longest(one, other, fillvalue=0), strict=True)), strict=True)
    return max(abs(a / totals[0] - b / totals[1]) for a, b in below)
