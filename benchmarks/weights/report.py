"""The report of a weight benchmark: targets, checks and tables from the numbers of `benchmarks.weights.rows`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.report import Check, Report, Table, Target, about, short, table, write_report
from benchmarks.weights.options import OURS, Mode, Options
from benchmarks.weights.picture import write_timeline
from benchmarks.weights.records import Raw, RunRecord, read_raw
from benchmarks.weights.rows import Interval, Noise, Row, Served, count_served, rows_of
from benchmarks.weights.stats import RESAMPLES, Ratio, Spread

_GIGA = 1e9
_TITLES = {
    Mode.STEADY: "no update",
    Mode.FLIP: "ours: flip, unpaced",
    Mode.PACED: "ours: flip, paced",
    Mode.COPY: "ours: copy",
    Mode.TENSOR: "stock: pause + tensor",
    Mode.DISTRIBUTED: "stock: pause + distributed",
    Mode.DISK: "stock: pause + disk",
}
_UPDATE_HEADER = (
    "one update every",
    "updates",
    "publish -> commit ms p50 / p99",
    "manifest -> commit ms p50 / p99",
    "trainer blocked ms",
    "staging ms p50",
    "GB/s a rank",
    "commit ms p50 / max",
    "GB moved",
)
_GAP_HEADER = (
    "window",
    "s",
    "passes",
    "gap ms p50 / p99 / max",
    "p99 against steady (95 %)",
    "from publish to commit: p99 / max",
    "client gap ms p50 / p99 / max",
    "tokens/s",
    "against steady (95 %)",
)
_DOCUMENT_HEADER = (
    "model",
    "window",
    "publish -> commit ms p50 / p99",
    "commit ms max",
    "gap ms p50 / p99 / max",
    "gap p99 / steady (95 %)",
    "tokens/s",
    "/ steady (95 %)",
    "client gap ms p50 / p99 / max",
)


class WeightsReport(Report, frozen=True, kw_only=True):
    """With what the tables are made from."""

    run: RunRecord
    noise: Row | None
    """Every second steady window against the others: what the comparison shows when nothing differs."""
    steady: Noise | None
    requests: Served


def report_of(out: Path) -> WeightsReport:
    """Write report, table and `weights.png` from the raw file; raises DataError when there is none."""
    raw = read_raw(out)
    report = build_report(raw)
    write_report(out, report)
    write_timeline(raw, out / "weights.png")
    return report


def build_report(raw: Raw, *, resamples: int = RESAMPLES) -> WeightsReport:
    """Compute everything from the raw file; `resamples` sets how fine the bootstrap intervals are."""
    rows, noise, steady = rows_of(raw, resamples=resamples)
    requests = count_served(raw)
    report = WeightsReport(
        **about(raw.header),
        rows=rows,
        shown=[],
        run=raw.run,
        noise=noise,
        steady=steady,
        targets=_targets(raw, rows, cut=requests.cut),
        checks=[*raw.run.checks, *_event_checks(raw)],
        requests=requests,
    )
    return msgspec.structs.replace(report, shown=_shown(report, raw.options))


def _event_checks(raw: Raw) -> list[Check]:
    """What the events themselves prove about our updates."""
    ours = [update for update in raw.updates if update.mode in OURS]
    good = [update for update in ours if not update.error]
    torn = [u.version for u in good if len(set(u.forwards)) > 1]
    digests = [u for u in good if u.served_digest]
    wrong = [u.version for u in digests if any(one != u.manifest_digest for one in u.served_digest)]
    unordered = sum(list(map(_first, request.versions)) != sorted(map(_first, request.versions)) for request in raw.requests)
    unstamped = [r for r in raw.requests if r.made and not r.error and sum(length for _, length in r.versions) != r.made]
    return [
        Check("every update of ours was committed", len(good) == len(ours), f"{len(good)} of {len(ours)}"),
        Check("all ranks commit before the same forward pass", not torn, f"{len(good)} commits, {len(raw.forwards)} ranks" + _few(torn)),
        Check("served digest = manifest digest on every rank", bool(digests) and not wrong, f"{len(digests)} versions" + _few(wrong)),
        Check("every token is stamped with its version", not unstamped, f"{len(raw.requests)} requests, {len(unstamped)} without"),
        Check("a request's versions never go back", unordered == 0, f"{len(raw.requests)} requests, {unordered} out of order"),
    ]


def _first(run: tuple[int, int]) -> int:
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
    seconds, nbytes = _graph_set(raw.run)
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
    return [*targets, Target("requests aborted, retracted, prefilled again or failed", "0", str(cut), cut == 0)]


def _graph_set(run: RunRecord) -> tuple[float, float]:
    """Seconds and bytes of the second set of graphs, of the rank that needed most; NaN where there is none."""
    ranks = [rank for rank in run.hello if rank.get("graphs_s")]
    if not ranks:
        return float("nan"), float("nan")
    return max(float(rank["graphs_s"]) for rank in ranks), max(float(rank.get("graphs_nbytes") or 0) for rank in ranks)


def _upper(name: str, got: float, wanted: float) -> Target:
    known = not math.isnan(got)
    return Target(name, f"<= {wanted:g}", f"{got:.3g}" if known else "-", got <= wanted if known else None)


def _ratio(name: str, got: Ratio | None, wanted: float, *, least: bool = False) -> Target:
    said = f"{'>=' if least else '<='} {wanted:g}"
    if got is None:
        return Target(name, said, "-", None)
    return Target(name, said, f"{got.value:.3f} ({got.low:.3f} to {got.high:.3f})", got.value >= wanted if least else got.value <= wanted)


def _shown(report: WeightsReport, options: Options) -> list[Table | str]:
    """What is shown of a run, before targets and checks."""
    run = report.run
    windows = [*report.rows, *([report.noise] if report.noise else [])]
    headline = (
        f"**{options.shape}**, {run.nbytes / _GIGA:.2f} GB in {run.num_tensors} tensors, SGLang {run.sglang}, "
        f"TP {options.tensor_parallel}, {run.num_devices} x {run.device}; trainer's weights on {options.trainer_device}, "
        f"transport {run.transport}; {options.streams} streams of {options.mean_tokens} tokens on average, "
        f"{options.probes} of them streaming."
        + (f" Paced windows: {options.max_gap_ms:g} ms of copying beside a pass." if options.max_gap_ms else "")
    )
    shown: list[Table | str] = [
        headline,
        Table(_UPDATE_HEADER, [_update_cells(row) for row in report.rows if row.updates or row.failed]),
        Table(_GAP_HEADER, [_gap_cells(row) for row in windows]),
    ]
    gpus = sorted({name for moment in run.gpu_memory for name in moment if name != "moment"})
    if gpus:
        used = [[str(moment["moment"]), *(f"{moment.get(gpu, 0) / _GIGA:.1f}" for gpu in gpus)] for moment in run.gpu_memory]
        shown.append(Table(["GPU memory, GB", *gpus], used))
    return [*shown, _footnotes(report)]


def _update_cells(row: Row) -> list[str]:
    speed = row.gigabytes_per_s
    return [
        _title(row),
        f"{row.updates}" + (f" ({row.failed} failed)" if row.failed else ""),
        f"{_ms(row.publish_to_commit.p50)} / {_ms(row.publish_to_commit.p99)}",
        f"{_ms(row.announced_to_commit.p50)} / {_ms(row.announced_to_commit.p99)}",
        _ms(row.blocked.p50),
        _ms(row.stage.p50),
        f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}" if speed else "-",
        f"{_ms(row.commit.p50)} / {_ms(row.commit.max)}" + (f", GPU {_ms(row.commit_copy.p50)}" if row.commit_copy.n else ""),
        f"{row.wire_bytes / _GIGA:.3g}",
    ]


def _gap_cells(row: Row) -> list[str]:
    return [
        _title(row),
        f"{row.seconds:.0f}",
        str(row.gap.n),
        _three(row.gap),
        _interval(row.gap_p99_ratio),
        f"{_ms(row.gap_during.p99)} / {_ms(row.gap_during.max)}" if row.gap_during.n else "-",
        _three(row.client_gap),
        f"{row.tokens_per_s:,.0f}",
        _interval(row.tokens_ratio),
    ]


def render_several(reports: Sequence[Report]) -> str:
    """One table for documents: a line for every kind of window of every run; steady windows first, then ours, then stock's."""
    order = list(Mode)
    lines: list[list[str]] = []
    for report in reports:
        options = msgspec.convert(report.spec, Options)
        parallel = f", TP {options.tensor_parallel}" if options.tensor_parallel > 1 else ""
        for row in sorted(report.rows, key=lambda row: order.index(Mode(row.mode))):
            _, _, _, gap, gap_ratio, _, client_gap, tokens_per_s, tokens_ratio = _gap_cells(row)
            between = f"{_ms(row.publish_to_commit.p50)} / {_ms(row.publish_to_commit.p99)}" if row.updates else "-"
            window = [f"{options.shape}{parallel}, {options.streams} streams", _title(row), between, _ms(row.commit.max)]
            lines.append([*window, gap, gap_ratio, tokens_per_s, tokens_ratio, client_gap])
    return table(Table(_DOCUMENT_HEADER, lines))


def _title(row: Row) -> str:
    """What the windows are called in tables."""
    mode, _, every = row.title.partition(", ")
    if mode not in _TITLES or (mode == Mode.STEADY and every):
        return row.title
    return _TITLES[Mode(mode)] + (f", {every}" if every else "")


def _three(spread: Spread) -> str:
    """Median, 99th percentile and greatest value."""
    return f"{_ms(spread.p50)} / {_ms(spread.p99)} / {_ms(spread.max)}" if spread.n else "-"


def _interval(ratio: Ratio | None) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})" if ratio else "-"


def _ms(value: float) -> str:
    return short(value).replace(",", "")


def _footnotes(report: WeightsReport) -> str:
    seconds, nbytes = _graph_set(report.run)
    buffers = [float(rank.get("buffer_nbytes") or 0) for rank in report.run.hello]
    requests, steady = report.requests, report.steady
    notes = [
        f"{requests.ended} requests ended, {requests.aborted} aborted, {requests.retracted} retracted, "
        f"{requests.prefilled_again} prefilled again, {requests.failed} failed; "
        f"{requests.mixed} went on through a change of weights (up to {requests.most_versions} versions in one)."
    ]
    if steady:
        notes.append(
            f"Steady windows among themselves ({steady.windows}, each against the median of all): gap p50 {_from_to(steady.gap_p50)}, "
            f"p99 {_from_to(steady.gap_p99)}, tokens/s {_from_to(steady.tokens_per_s)}."
        )
    if any(buffers):
        notes.append(f"Second buffer: {max(buffers) / _GIGA:.2f} GB a rank.")
    if not math.isnan(seconds):
        notes.append(f"Second graph set: {seconds:.2f} s, {nbytes / _GIGA:.2f} GB a rank.")
    notes.append(f"Server ready after {report.run.start_server_s:.0f} s.")
    return " ".join(notes)


def _from_to(interval: Interval) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}"
