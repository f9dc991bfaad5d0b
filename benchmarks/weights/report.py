"""The report of a weight benchmark: a pure function of its raw files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from benchmarks.weights.plan import OURS, Mode
from benchmarks.weights.raw import Raw
from benchmarks.weights.records import Check, Floats, RunRecord, UpdateRecord, WindowRecord
from benchmarks.weights.served import Served, count_served
from benchmarks.weights.stats import (
    RESAMPLES,
    Gaps,
    Ratio,
    Spread,
    blocks_of,
    gaps_of,
    p50,
    p99,
    ratio,
    spread,
    token_gaps_ms,
    tokens_per_s,
    within,
)

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
    gap_decode: Spread
    """Without the passes that prefill new requests."""
    client_gap: Spread
    """Between chunks of a streaming client."""
    tokens_per_s: float
    rows_p50: float
    """Streams in a pass, median."""
    gap_p99_ratio: Ratio | None = None
    """Against the steady windows right before and after."""
    gap_p50_ratio: Ratio | None = None
    gap_decode_p99_ratio: Ratio | None = None
    gap_during_p99_ratio: Ratio | None = None
    tokens_ratio: Ratio | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Something promised, and what was measured. `met` is None where this run could not measure it."""

    name: str
    wanted: str
    got: str
    met: bool | None


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How much the steady windows differ among themselves: the smallest and the greatest value of one, over the median of all."""

    windows: int
    gap_p50: Interval
    gap_p99: Interval
    tokens_per_s: Interval


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the table and the picture show."""

    run: RunRecord
    rows: list[Row]
    noise: Row | None
    """Every second steady window against the others: what the comparison shows when nothing differs."""
    steady: Noise | None
    targets: list[Target]
    checks: list[Check]
    requests: Served


def build_report(raw: Raw, *, resamples: int = RESAMPLES) -> Report:
    """Compute everything from the raw files; `resamples` sets how fine the bootstrap intervals are."""
    gaps = gaps_of(raw.forwards[0])
    titles = list(dict.fromkeys(window.title for window in raw.run.windows))
    rows = [_row(raw, gaps, title, _indices(raw, title), _beside(raw, title), resamples) for title in titles]
    steady = _indices(raw, Mode.STEADY)
    noise = _row(raw, gaps, "steady, 2nd, 4th, ... against the rest", steady[1::2], steady[::2], resamples) if len(steady) > 1 else None
    requests = count_served(raw.run, raw.requests, raw.forwards[0])
    return Report(
        run=raw.run,
        rows=rows,
        noise=noise,
        steady=_noise(gaps, _intervals(raw, steady)),
        targets=_targets(raw, rows, cut=requests.cut),
        checks=[*raw.run.checks, *_event_checks(raw)],
        requests=requests,
    )


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
        gap_decode=spread(gaps.ms[inside & gaps.decode]),
        client_gap=spread(np.concatenate(streams) if streams else np.empty(0)),
        tokens_per_s=tokens_per_s(np.concatenate(here)) if here else 0.0,
        rows_p50=float(np.median(gaps.rows[inside])) if inside.any() else 0.0,
        gap_p99_ratio=ratio(here, there, p99, resamples=resamples),
        gap_p50_ratio=ratio(here, there, p50, resamples=resamples),
        gap_decode_p99_ratio=ratio(
            blocks_of(gaps, intervals, decode_only=True),
            blocks_of(gaps, _intervals(raw, others), decode_only=True),
            p99,
            resamples=resamples,
        ),
        gap_during_p99_ratio=ratio(blocks_of(gaps, during), there, p99, resamples=resamples),
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


def _event_checks(raw: Raw) -> list[Check]:
    """What the events themselves prove about our updates."""
    ours = [update for update in raw.updates if update.mode in OURS]
    good = [update for update in ours if not update.error]
    torn = [u.version for u in good if len(set(u.forwards)) > 1]
    digests = [u for u in good if u.served_digest]
    wrong = [u.version for u in digests if any(one != u.manifest_digest for one in u.served_digest)]
    unordered = sum(list(map(first, request.versions)) != sorted(map(first, request.versions)) for request in raw.requests)
    unstamped = [r for r in raw.requests if r.made and not r.error and sum(length for _, length in r.versions) != r.made]
    return [
        Check("every update of ours was committed", len(good) == len(ours), f"{len(good)} of {len(ours)}"),
        Check("all ranks commit before the same forward pass", not torn, f"{len(good)} commits, {len(raw.forwards)} ranks" + _few(torn)),
        Check("served digest = manifest digest on every rank", bool(digests) and not wrong, f"{len(digests)} versions" + _few(wrong)),
        Check("every token is stamped with its version", not unstamped, f"{len(raw.requests)} requests, {len(unstamped)} without"),
        Check("a request's versions never go back", unordered == 0, f"{len(raw.requests)} requests, {unordered} out of order"),
    ]


def first(run: tuple[int, int]) -> int:
    """The version of a run of equal versions."""
    return run[0]


def _few(names: Sequence[str]) -> str:
    return f": {', '.join(names[:3])}" if names else ""


def _targets(raw: Raw, rows: Sequence[Row], *, cut: int) -> list[Target]:
    by_title = {row.title: row for row in rows}
    ours = [row for row in rows if row.mode in (Mode.FLIP, Mode.PACED) and row.updates]
    paced = by_title.get("paced, 1 s") or next((row for row in ours if row.mode == Mode.PACED), None)
    flip = next((row for row in ours if row.mode == Mode.FLIP), None)
    commit = max((row.commit.max for row in ours), default=float("nan"))
    seconds, nbytes = graph_set(raw.run)
    targets = [
        _upper("commit, slowest, ms", commit, 0.5),
        _ratio("gap p99, updates every second / steady", paced and paced.gap_p99_ratio, 1.05),
        _ratio("tokens/s, updates every second / steady", paced and paced.tokens_ratio, 0.99, least=True),
        _upper("publish to commit, unpaced, p50 ms", flip.publish_to_commit.p50 if flip else float("nan"), 60.0),
        _upper("second graph set, s", seconds, 3.0),
        _upper("second graph set, GB", nbytes / 1e9, 0.5),
    ]
    if raw.run.device == "CPU":
        targets = [msgspec.structs.replace(target, met=None) for target in targets]
    return [*targets, Target(name="requests aborted, retracted, prefilled again or failed", wanted="0", got=str(cut), met=cut == 0)]


def graph_set(run: RunRecord) -> tuple[float, float]:
    """Seconds and bytes of the second set of graphs, of the rank that needed most; NaN where there is none."""
    ranks = [rank for rank in run.hello if rank.get("graphs_s")]
    if not ranks:
        return float("nan"), float("nan")
    return max(float(rank["graphs_s"]) for rank in ranks), max(float(rank.get("graphs_nbytes") or 0) for rank in ranks)


def _upper(name: str, got: float, wanted: float) -> Target:
    known = got == got
    return Target(name=name, wanted=f"<= {wanted:g}", got=f"{got:.3g}" if known else "-", met=got <= wanted if known else None)


def _ratio(name: str, got: Ratio | None, wanted: float, *, least: bool = False) -> Target:
    sign = ">=" if least else "<="
    if got is None:
        return Target(name=name, wanted=f"{sign} {wanted:g}", got="-", met=None)
    met = got.value >= wanted if least else got.value <= wanted
    return Target(name=name, wanted=f"{sign} {wanted:g}", got=f"{got.value:.3f} ({got.low:.3f} to {got.high:.3f})", met=met)
