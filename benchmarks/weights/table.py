"""The report as Markdown: aligned, so that it reads as plain text too."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.weights.plan import Mode
from benchmarks.weights.report import Report, Row, graph_set
from benchmarks.weights.stats import Ratio, Spread

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


def render(report: Report) -> str:
    """The whole report, ending in a line break."""
    parts = [
        _headline(report),
        table(_update_header(), [_update_cells(row) for row in report.rows if row.updates or row.failed]),
        table(_gap_header(), [_gap_cells(row) for row in (*report.rows, *([report.noise] if report.noise else []))]),
        table(["target", "wanted", "got", "met"], [[t.name, t.wanted, t.got, _said(t.met)] for t in report.targets]),
        table(["check", "held", "over"], [[c.name, _said(c.held), c.detail] for c in report.checks]),
        *([_memory_table(report)] if any(len(moment) > 1 for moment in report.run.gpu_memory) else []),
        _footnotes(report),
    ]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with its columns padded to equal width."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = [_line(header, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    return "\n".join(lines + [_line(row, widths) for row in rows])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _headline(report: Report) -> str:
    run = report.run
    return (
        f"**{run.shape}**, {run.nbytes / _GIGA:.2f} GB in {run.num_tensors} tensors, SGLang {run.sglang}, TP {run.tensor_parallel}, "
        f"{run.num_devices} x {run.device}; trainer's weights on {run.trainer_device}, transport {run.transport}; "
        f"{run.streams} streams of {run.mean_tokens} tokens on average, {run.probes} of them streaming."
        + (f" Paced windows: {run.max_gap_ms:g} ms of copying beside a pass." if run.max_gap_ms else "")
    )


def _update_header() -> list[str]:
    return [
        "one update every",
        "updates",
        "publish -> commit ms p50 / p99",
        "manifest -> commit ms p50 / p99",
        "trainer blocked ms",
        "staging ms p50",
        "GB/s a rank",
        "commit ms p50 / max",
        "GB moved",
    ]


def _update_cells(row: Row) -> list[str]:
    return [
        title_text(row),
        f"{row.updates}" + (f" ({row.failed} failed)" if row.failed else ""),
        f"{ms_text(row.publish_to_commit.p50)} / {ms_text(row.publish_to_commit.p99)}",
        f"{ms_text(row.announced_to_commit.p50)} / {ms_text(row.announced_to_commit.p99)}",
        ms_text(row.blocked.p50),
        ms_text(row.stage.p50),
        _speed_text(row.gigabytes_per_s),
        f"{ms_text(row.commit.p50)} / {ms_text(row.commit.max)}" + (f", GPU {ms_text(row.commit_copy.p50)}" if row.commit_copy.n else ""),
        f"{row.wire_bytes / _GIGA:.3g}",
    ]


def _gap_header() -> list[str]:
    return [
        "window",
        "s",
        "passes",
        "gap ms p50 / p99 / max",
        "p99 against steady (95 %)",
        "from publish to commit: p99 / max",
        "decode only: p50 / p99",
        "client gap ms p50 / p99 / max",
        "tokens/s",
        "against steady (95 %)",
    ]


def _gap_cells(row: Row) -> list[str]:
    return [
        title_text(row),
        f"{row.seconds:.0f}",
        str(row.gap.n),
        three_text(row.gap),
        interval_text(row.gap_p99_ratio),
        f"{ms_text(row.gap_during.p99)} / {ms_text(row.gap_during.max)}" if row.gap_during.n else "-",
        f"{ms_text(row.gap_decode.p50)} / {ms_text(row.gap_decode.p99)}",
        three_text(row.client_gap),
        f"{row.tokens_per_s:,.0f}",
        interval_text(row.tokens_ratio),
    ]


def _memory_table(report: Report) -> str:
    moments = report.run.gpu_memory
    gpus = sorted({name for moment in moments for name in moment if name != "moment"})
    header = ["GPU memory, GB", *gpus]
    return table(header, [[str(moment["moment"]), *(f"{moment.get(gpu, 0) / _GIGA:.1f}" for gpu in gpus)] for moment in moments])


def title_text(row: Row) -> str:
    """What the windows are called in tables."""
    mode, _, every = row.title.partition(", ")
    if mode not in _TITLES or (mode == Mode.STEADY and every):
        return row.title
    return _TITLES[Mode(mode)] + (f", {every}" if every else "")


def three_text(spread: Spread) -> str:
    """Median, 99th percentile and greatest value."""
    return f"{ms_text(spread.p50)} / {ms_text(spread.p99)} / {ms_text(spread.max)}" if spread.n else "-"


def interval_text(ratio: Ratio | None) -> str:
    """A ratio and its 95 % interval."""
    return f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})" if ratio else "-"


def ms_text(value: float) -> str:
    """Milliseconds with three digits or so."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _said(met: bool | None) -> str:
    return "not measured" if met is None else "yes" if met else "NO"


def _footnotes(report: Report) -> str:
    seconds, nbytes = graph_set(report.run)
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


def _speed_text(gigabytes_per_s: float) -> str:
    return f"{gigabytes_per_s:.0f}" if gigabytes_per_s >= 10 else f"{gigabytes_per_s:.2g}" if gigabytes_per_s else "-"


def _from_to(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}"
