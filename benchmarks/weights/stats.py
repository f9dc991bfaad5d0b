"""Numbers from events: gaps between forward passes, their quantiles, and how sure one can be of a ratio of two of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.weights.records import Floats, Forwards, Tokens

Blocks = Sequence[Floats]
"""Stretches of consecutive gaps, each [n, 2] float64: milliseconds, tokens. They are resampled whole, for neighbours are alike."""

RESAMPLES = 1000
_BLOCK_S = 0.5


class Spread(msgspec.Struct, frozen=True):
    """Quantiles of a sample in milliseconds; NaN where it is empty."""

    p50: float
    p99: float
    max: float
    n: int


class Ratio(msgspec.Struct, frozen=True):
    """A ratio of two statistics with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class Gaps(msgspec.Struct, frozen=True, kw_only=True):
    """Gap i ends with forward pass i + 1 and begins with the end of the one before. All arrays [n]."""

    ms: Floats
    at_s: Floats
    """When the host began to launch the pass that ends the gap."""
    rows: Floats
    """Tokens that the pass made."""


def gaps_of(forwards: Forwards) -> Gaps:
    """Gaps between the ends of consecutive forward passes, by CUDA events."""
    return Gaps(ms=np.diff(forwards.gpu_ms), at_s=forwards.host_s[1:], rows=forwards.rows[1:].astype(np.float64))


def spread(ms: Floats) -> Spread:
    """Quantiles of a sample of milliseconds."""
    if len(ms) == 0:
        return Spread(float("nan"), float("nan"), float("nan"), 0)
    p50, p99 = np.quantile(ms, (0.5, 0.99))
    return Spread(float(p50), float(p99), float(ms.max()), len(ms))


def within(at_s: Floats, intervals: Sequence[tuple[float, float]]) -> npt.NDArray[np.bool_]:
    """Which times lie in one of the intervals [start, end): [n] bool."""
    inside = np.zeros(len(at_s), np.bool_)
    for start, end in intervals:
        inside |= (at_s >= start) & (at_s < end)
    return inside


def blocks_of(gaps: Gaps, intervals: Sequence[tuple[float, float]]) -> Blocks:
    """The gaps of each interval, cut into stretches of half a second; an interval without gaps gives no block."""
    blocks: list[Floats] = []
    for start, end in intervals:
        pieces = max(1, round((end - start) / _BLOCK_S))
        edges = np.linspace(start, end, pieces + 1)
        for low, high in itertools.pairwise(edges):
            chosen = (gaps.at_s >= low) & (gaps.at_s < high)
            if chosen.any():
                blocks.append(np.stack([gaps.ms[chosen], gaps.rows[chosen]], axis=1))
    return blocks


def p99(values: Floats) -> float:
    """99th percentile of the gaps of [n, 2] values."""
    return float(np.quantile(values[:, 0], 0.99))


def p50(values: Floats) -> float:
    """Median of the gaps of [n, 2] values."""
    return float(np.quantile(values[:, 0], 0.5))


def tokens_per_s(values: Floats) -> float:
    """Tokens over the time of the gaps of [n, 2] values."""
    return float(values[:, 1].sum() / values[:, 0].sum() * 1e3)


def ratio(new: Blocks, old: Blocks, statistic: Callable[[Floats], float], *, resamples: int = RESAMPLES, seed: int = 0) -> Ratio | None:
    """statistic(new) / statistic(old) with a 95 % interval from a bootstrap of both sides' blocks; None without blocks.

    The interval says what chance within these windows allows; it cannot know of a change that is as slow as a window is long,
    which is why update windows stand between steady ones.
    """
    if not new or not old:
        return None
    value = statistic(np.concatenate(new)) / statistic(np.concatenate(old))
    random = np.random.default_rng(seed)
    drawn = np.empty(resamples)
    for i in range(resamples):
        drawn[i] = statistic(_resample(new, random)) / statistic(_resample(old, random))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Ratio(value, float(low), float(high))


def token_gaps_ms(tokens: Tokens, start_s: float, end_s: float) -> Floats:
    """Milliseconds between a stream's consecutive chunks whose later one arrived in [start, end); all streams together."""
    if len(tokens.at_s) == 0:
        return np.empty(0)
    order = np.lexsort((tokens.at_s, tokens.request, tokens.lane))
    lane, request, at_s = tokens.lane[order], tokens.request[order], tokens.at_s[order]
    same = (lane[1:] == lane[:-1]) & (request[1:] == request[:-1])
    chosen = same & (at_s[1:] >= start_s) & (at_s[1:] < end_s)
    return np.diff(at_s)[chosen] * 1e3


def clock_offset_s(host_s: Floats, gpu_ms: Floats) -> float:
    """What to add to `gpu_ms` / 1000 for the host's clock, too much by the host's share of a pass (a millisecond or so) at most.

    No pass ends before its launch. And SGLang launches pass i + 2 only once it has the tokens of pass i, mostly at once.
    """
    end_s = gpu_ms / 1e3
    if len(end_s) == 0:
        return 0.0
    least = float(np.max(host_s - end_s))
    most = float(np.min(host_s[2:] - end_s[:-2])) if len(end_s) > 2 else least
    return max(least, most)


def _resample(blocks: Blocks, random: np.random.Generator) -> Floats:
    return np.concatenate([blocks[i] for i in random.integers(0, len(blocks), len(blocks))])
