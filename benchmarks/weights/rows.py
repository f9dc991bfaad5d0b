"""What is computed from the events of a weight benchmark: a row for each kind of window, and what became of the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from benchmarks.weights.options import Mode
from benchmarks.weights.records import Floats, Raw, UpdateRecord, WindowRecord
from benchmarks.weights.stats import Gaps, Ratio, Spread, blocks_of, gaps_of, p50, p99, ratio, spread, token_gaps_ms, tokens_per_s, within

Interval = tuple[float, float]
_MARGIN_FORWARDS = 3
"""Forward passes after a commit that still count as during the update."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """All windows of one title together."""

    title: str
    mode: str
    windows: int
    seconds: float
    updates: int
    failed: int
    publish_to_commit: Spread
    """Milliseconds from the trainer's hand-over to the last rank serving it (stock: to continued generation)."""
    announced_to_commit: Spread
    """The part of it after the manifest is out (stock: of the pause)."""
    blocked: Spread
    """Milliseconds from the hand-over until the trainer may write to its weights again."""
    stage: Spread
    """Milliseconds of the slowest rank."""
    gigabytes_per_s: float
    """Bytes of a rank over its staging time, median over updates."""
    commit: Spread
    """Milliseconds of host time of the slowest rank."""
    commit_copy: Spread
    """Where a commit copies: milliseconds of the copy on the slowest rank's device."""
    wire_bytes: int
    """Bytes moved for one update to all ranks, median."""
    gap: Spread
    """Between forward passes, in these windows."""
    gap_during: Spread
    """Those from publish to commit and three passes more."""
    client_gap: Spread
    """Between chunks of a streaming client."""
    tokens_per_s: float
    gap_p99_ratio: Ratio | None = None
    """Against the steady windows right before and after."""
    tokens_ratio: Ratio | None = None


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of requests."""

    ended: int
    aborted: int
    retracted: int
    failed: int
    prefilled_again: int
    """Prefills from the first window to the last beyond one for each request that was under way then; at least so many were repeated."""
    mixed: int
    """Those with tokens of more than one version: they went on while the weights changed."""
    most_versions: int
    """Of one request."""

    @property
    def cut(self) -> int:
        """Requests that an update, or anything else, has disturbed."""
        return self.aborted + self.retracted + self.failed + self.prefilled_again


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How much the steady windows differ among themselves: the smallest and the greatest value of one, over the median of all."""

    windows: int
    gap_p50: Interval
    gap_p99: Interval
    tokens_per_s: Interval


def rows_of(raw: Raw, *, resamples: int) -> tuple[list[Row], Row | None, Noise | None]:
    """A row for each title in order of appearance, one of every second steady window against the others, and how steady windows differ."""
    gaps = gaps_of(raw.forwards[0])
    titles = list(dict.fromkeys(window.title for window in raw.run.windows))
    rows = [_row(raw, gaps, title, _indices(raw, title), _beside(raw, title), resamples) for title in titles]
    steady = _indices(raw, Mode.STEADY)
    again = _row(raw, gaps, "steady, 2nd, 4th, ... against the rest", steady[1::2], steady[::2], resamples) if len(steady) > 1 else None
    return rows, again, _noise(gaps, _intervals(raw, steady))


def count_served(raw: Raw) -> Served:
    """Count what ended; each of the run's streams had one more request under way at the end."""
    versions = [len({version for version, _ in request.versions}) for request in raw.requests]
    return Served(
        ended=len(raw.requests),
        aborted=sum(request.finish == "abort" for request in raw.requests),
        retracted=sum(request.retractions for request in raw.requests),
        failed=sum(bool(request.error) for request in raw.requests),
        prefilled_again=_prefilled_again(raw),
        mixed=sum(count > 1 for count in versions),
        most_versions=max(versions, default=0),
    )


def _prefilled_again(raw: Raw) -> int:
    if not raw.run.windows:
        return 0
    start_s, end_s = raw.run.windows[0].start_s, raw.run.windows[-1].end_s
    forwards = raw.forwards[0]
    inside = forwards.extend & within(forwards.host_s, [(start_s, end_s)])
    known = sum(request.end_s >= start_s and request.start_s < end_s for request in raw.requests)
    return max(0, int(forwards.rows[inside].sum()) - known - raw.options.streams)


def update_interval(update: UpdateRecord, margin_s: float) -> Interval:
    """From publish to commit and a margin more."""
    return update.publish_s, update.commit_s + margin_s


def _indices(raw: Raw, title: str) -> list[int]:
    return [i for i, window in enumerate(raw.run.windows) if window.title == title]


def _beside(raw: Raw, title: str) -> list[int]:
    """Steady windows right before and after the windows of a title."""
    windows = raw.run.windows
    near = {j for i in _indices(raw, title) for j in (i - 1, i + 1) if 0 <= j < len(windows)}
    return sorted(j for j in near if windows[j].mode == Mode.STEADY and windows[j].title != title)


def _intervals(raw: Raw, indices: Sequence[int]) -> list[Interval]:
    return [(raw.run.windows[i].start_s, raw.run.windows[i].end_s) for i in indices]


def _row(raw: Raw, gaps: Gaps, title: str, indices: Sequence[int], others: Sequence[int], resamples: int) -> Row:
    windows: list[WindowRecord] = [raw.run.windows[i] for i in indices]
    intervals = _intervals(raw, indices)
    inside = within(gaps.at_s, intervals)
    tried = [update for update in raw.updates if update.window in indices]
    updates = [update for update in tried if not update.error]
    margin_s = _MARGIN_FORWARDS * float(np.median(gaps.ms[inside])) / 1e3 if inside.any() else 0.0
    during = [update_interval(update, margin_s) for update in updates]
    here, there = blocks_of(gaps, intervals), blocks_of(gaps, _intervals(raw, others))
    streams = [token_gaps_ms(raw.tokens, *interval) for interval in intervals]
    moved = [(max(update.nbytes, default=0), max(update.stage_ms, default=0.0)) for update in updates]
    return Row(
        title=title,
        mode=windows[0].mode if windows else "",
        windows=len(windows),
        seconds=sum(end - start for start, end in intervals),
        updates=len(updates),
        failed=len(tried) - len(updates),
        publish_to_commit=spread(np.array([(u.commit_s - u.publish_s) * 1e3 for u in updates])),
        announced_to_commit=spread(np.array([(u.commit_s - u.announced_s) * 1e3 for u in updates])),
        blocked=spread(np.array([(u.released_s - u.publish_s) * 1e3 for u in updates])),
        stage=spread(np.array([ms for _, ms in moved if ms > 0])),
        gigabytes_per_s=float(np.median([nbytes / ms / 1e6 for nbytes, ms in moved if ms > 0] or [0.0])),
        commit=spread(np.array([max(u.commit_ms) for u in updates if u.commit_ms])),
        commit_copy=spread(np.array([max(u.device_ms) for u in updates if u.device_ms])),
        wire_bytes=int(np.median([sum(u.nbytes) for u in updates] or [0])),
        gap=spread(gaps.ms[inside]),
        gap_during=spread(gaps.ms[within(gaps.at_s, during)]),
        client_gap=spread(np.concatenate(streams) if streams else np.empty(0)),
        tokens_per_s=tokens_per_s(np.concatenate(here)) if here else 0.0,
        gap_p99_ratio=ratio(here, there, p99, resamples=resamples),
        tokens_ratio=ratio(here, there, tokens_per_s, resamples=resamples),
    )


def _noise(gaps: Gaps, intervals: Sequence[Interval]) -> Noise | None:
    windows = [np.concatenate(blocks) for interval in intervals if (blocks := blocks_of(gaps, [interval]))]
    if len(windows) < 2:
        return None

    def extremes(statistic: Callable[[Floats], float]) -> Interval:
        values = np.array([statistic(window) for window in windows])
        values /= np.median(values)
        return float(values.min()), float(values.max())

    return Noise(windows=len(windows), gap_p50=extremes(p50), gap_p99=extremes(p99), tokens_per_s=extremes(tokens_per_s))
