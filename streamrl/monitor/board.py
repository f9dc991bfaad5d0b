"""What `streamrl top` shows, as lines of exactly the width that there is: nothing wraps. No terminal, no clock, no bus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from streamrl.monitor.lengths import distance_text, quantiles, side_by_side
from streamrl.monitor.numbers import EngineLine, RunNumbers, WorkerLine
from streamrl.monitor.screen import clock, decimal, is_normal, one_line, short, sparkline, summary_rows, visible, warnings
from streamrl.monitor.slo import worst_of
from streamrl.monitor.summary import Summary, summary_line
from streamrl.telemetry.names import LENGTHS, length_quantile

_FEWEST_LINES = 3
"""Head, one line of what is below it, foot."""
_TITLE = Style(bold=True, reverse=True)
_MOST_NOTES = 3
_MOST_BARS = 40
_SYSTEMS = {
    "standard": ColorSystem.STANDARD,
    "256": ColorSystem.EIGHT_BIT,
    "truecolor": ColorSystem.TRUECOLOR,
    "windows": ColorSystem.WINDOWS,
}
_AGES = {
    "age, batch": {"p50": "staleness/p50", "p95": "staleness/p95", "max": "staleness/max"},
    "its samples": {"p50": "staleness/sample_p50", "p95": "staleness/sample_p95", "max": "staleness/sample_max"},
    "made of": {"in flight": "staleness/in_flight", "queued": "staleness/queued", "publish lag": "staleness/publish_lag"},
}
"""Of the newest batch."""
_TIMES = {"starved": "starvation/", "trainer": "trainer/share/", "slots": "producer/share/", "engines": "engine/share/"}
_LEAST_SHARE = 0.005
_ENDS = {
    "sampled": {
        "all": "tokens/sampled_total",
        "published": "tokens/published_total",
        "cut": "tokens/cut_total",
        "evaluated": "tokens/evaluated_total",
        "open": "tokens/open",
    },
    "stored": {
        "all": "tokens/stored_total",
        "trained": "tokens/trained_total",
        "masked": "tokens/masked_total",
        "waiting": "tokens/waiting",
    },
}


class SampleLine(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as people read it."""

    task: int
    rollout: int
    reward: float | None
    """None: it has none yet."""
    prompt: str
    """What stands before the first trained token."""
    answer: str
    """From there on."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a run."""

    run: str
    state: str
    """`running`, `finished`, `stopped`, `failed` or `interrupted`."""
    away: str = ""
    """Why the numbers are not of this moment; empty: they are."""
    numbers: RunNumbers | None = None
    """None until its bus has answered for the first time."""
    now_s: float = 0.0
    """Unix seconds."""
    samples_bytes: int = 0
    """Budget of the sample stream."""
    lag: dict[str, float] = {}
    """Ages and lags of the newest batch and window, by metric."""
    shares: dict[str, float] = {}
    """Of time in the newest window, and who starved (`trainer/share/...`, `starvation/...`), by metric."""
    goodput: dict[str, float] = {}
    """Tokens of the last minute by metric (`tokens/...`); `tokens/open` and `tokens/waiting` as they are now."""
    notes: tuple[str, ...] = ()
    """What workers wanted people to know, the oldest first."""
    samples: tuple[SampleLine, ...] = ()
    """The newest first."""
    summary: Summary | None = None
    """Of the last time it stopped."""


class Place(msgspec.Struct, frozen=True):
    """Where in the board somebody looks."""

    line: int = 0
    """The first one shown below the head."""
    paused: bool = False


class Board:
    """The lines of a look at one width.

    Args:
        look: what is shown.
        width: cells of a line.
        console: whose colours are used; its width does not matter.
    """

    def __init__(self, look: Look, width: int, console: Console) -> None:
        self._console, self._width = console, max(1, width)
        self._look = look
        self.lines: list[list[Segment]] = []
        self.starts: list[int] = []
        """Where each section begins."""
        for title, content in _sections(look):
            self.starts.append(len(self.lines))
            if title:
                self.lines += self._drawn(Text(title, style=_TITLE, no_wrap=True))
            for one in content:
                self.lines += self._drawn(one)

    def last_start(self, height: int) -> int:
        """The last line that may be the first shown, on a screen of `height` lines."""
        return max(0, len(self.lines) - max(1, height - 2))

    def frame(self, place: Place, height: int) -> list[str]:
        """The `height` lines of a screen: head, a part of the board, foot; with the terminal's codes for colours."""
        height = max(_FEWEST_LINES, height)
        first = min(place.line, self.last_start(height))
        shown = self.lines[first : first + height - 2]
        above = f"lines {first + 1}-{first + len(shown)} of {len(self.lines)}"
        keys = f"q quit  p {'go on' if place.paused else 'pause'}  arrows, page up/down scroll  tab section   {above}"
        blank: list[list[Segment]] = [[] for _ in range(height - 2 - len(shown))]
        (head,), (foot,) = self._drawn(_head(self._look, paused=place.paused)), self._drawn(Text(keys, style="dim"))
        return [self._coded(line) for line in [head, *shown, *blank, foot]]

    def text(self) -> list[str]:
        """All lines, the head first."""
        return [self._coded(line) for line in [*self._drawn(_head(self._look, paused=False)), *self.lines]]

    def _drawn(self, one: RenderableType) -> list[list[Segment]]:
        if isinstance(one, Text):
            one = Text(visible(one.plain), style=one.style, spans=one.spans, no_wrap=True, overflow="ellipsis")
        options = self._console.options.update(width=self._width, height=None, no_wrap=True, overflow="ellipsis")
        found = self._console.render_lines(one, options, pad=False)
        return [Segment.adjust_line_length(line, self._width, pad=False) for line in found]

    def _coded(self, line: Iterable[Segment]) -> str:
        return "".join(self._painted(part.text, part.style) for part in line)

    def _painted(self, text: str, style: Style | None) -> str:
        system = _SYSTEMS.get(self._console.color_system or "")
        if system is None or style is None:
            return text
        return (style.without_color if self._console.no_color else style).render(text, color_system=system)


def moved(place: Place, key: str, board: Board, height: int) -> Place:
    """Where somebody looks who was at `place` and has pressed a key by this name (`streamrl.monitor.terminal`)."""
    last = board.last_start(height)
    line, page = min(place.line, last), max(1, height - 3)
    match key:
        case "p":
            return Place(line, not place.paused)
        case "up" | "k":
            line -= 1
        case "down" | "j":
            line += 1
        case "page up":
            line -= page
        case "page down" | " ":
            line += page
        case "home" | "g":
            line = 0
        case "end" | "G":
            line = last
        case "tab" | "right":
            line = next((start for start in board.starts if start > line), last)
        case "back tab" | "left":
            line = max((start for start in board.starts if start < line), default=0)
        case _:
            pass
    return Place(min(max(0, line), last), place.paused)


def _head(look: Look, *, paused: bool) -> Text:
    numbers = look.numbers
    text = Text("streamrl ", style="bold")
    text.append(look.run, style="bold cyan")
    text.append(f"  {numbers.phase if numbers and look.state == 'running' else look.state}")
    if numbers:
        text.append(f"  {clock(numbers.elapsed_s)}  version {numbers.version}")
        level = worst_of(*(one.level for one in numbers.slo))
        text.append(f"  slo {level}", style={"ok": "green", "warn": "yellow"}.get(level, "bold red"))
    if paused:
        text.append("  paused", style="yellow")
    if look.away:
        text.append(f"  {look.away}", style="bold red")
    return text


def _sections(look: Look) -> list[tuple[str, Sequence[RenderableType]]]:
    numbers = look.numbers
    if numbers is None:
        return [("", [Text("nothing is known of it yet" if look.summary is None else summary_line(look.summary))])]
    sections: list[tuple[str, Sequence[RenderableType]]] = [("", [_fitted(summary_rows(numbers))])]
    if alerts := _alerts(look, numbers):
        sections.append(("alerts", alerts))
    sections += [
        ("engines", [_engines(numbers.engines)] if numbers.engines else [Text("none")]),
        ("workers", [_workers(numbers.workers, look.now_s)] if numbers.workers else [Text("none")]),
        ("lag", [_lag(look, numbers)]),
        *([("time, newest window", [_times(look.shares)])] if look.shares else []),
        *([("tokens, last minute", [_goodput(look.goodput)])] if look.goodput else []),
        ("dropped", [_drops(numbers)] if numbers.drops else [Text("nothing")]),
        *([("lengths", _lengths(numbers))] if numbers.lengths else []),
        ("samples", [line for one in look.samples for line in _sample(one)] or [Text("none was read")]),
    ]
    return sections


def _fitted(table: Table) -> Table:
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    return table


def _table(*titles: str, numeric: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if title in numeric else "left", no_wrap=True, overflow="ellipsis", header_style="dim")
    return table


def _alerts(look: Look, numbers: RunNumbers) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(f"{word}: {said}", style="yellow") for word, said in warnings(numbers)]
    lines += [Text(f"{engine.engine}: {engine.degraded}", style="yellow") for engine in numbers.engines if engine.degraded]
    lines += [Text(one_line(note), style="dim") for note in look.notes[-_MOST_NOTES:]]
    return lines


def _engines(engines: Sequence[EngineLine]) -> Table:
    table = _table("engine", "serves", "behind", "slots", "waiting", "tok/s", "prefix hits", numeric=("behind", "waiting", "tok/s"))
    for one in engines:
        behind = "" if one.behind is None else str(one.behind)
        hits = "" if one.prefix_hits is None else f"{one.prefix_hits:.0%}"
        cells = (one.engine, one.serving, behind, f"{one.running}/{one.slots}", str(one.waiting), short(one.tokens_per_s), hits)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def _workers(workers: Sequence[WorkerLine], now_s: float) -> Table:
    table = _table("worker", "state", "since", "restarts", "process")
    for one in workers:
        since = clock(max(0.0, now_s - one.since_s)) if one.since_s else ""
        where = f"{one.pid or ''} {one.host}".strip()
        state = Text(visible(one.state), style="default" if is_normal(one.state) else "yellow")
        table.add_row(Text(visible(one.worker)), state, since, str(one.restarts or ""), Text(visible(where)))
    return table


def _lag(look: Look, numbers: RunNumbers) -> Table:
    rows = Table.grid(padding=(0, 2))
    budget = f" of {short(look.samples_bytes)}B" if look.samples_bytes else ""
    tokens = "" if numbers.stream_tokens is None else f", {short(numbers.stream_tokens)} tokens not trained or dropped"
    rows.add_row(
        "stream", f"{numbers.stream_lag} messages, the oldest {numbers.stream_s:.1f} s; {short(numbers.stream_bytes)}B{budget}{tokens}"
    )
    rows.add_row("age, run", f"p50 {numbers.staleness_p50:g}  p95 {numbers.staleness_p95:g}  max {numbers.staleness_max} versions")
    for title, names in _AGES.items():
        words = [f"{word} {look.lag[name]:.4g}" for word, name in names.items() if name in look.lag]
        if words:
            rows.add_row(title, "  ".join(words) + " versions")
    behind = [one.behind for one in numbers.engines if one.behind is not None]
    if behind:
        rows.add_row("engines", f"{min(behind)} to {max(behind)} versions behind")
    if (commit_s := look.lag.get("lag/publish_to_commit_s")) is not None:
        rows.add_row("weights", f"{commit_s:.2f} s from publish to commit")
    tasks = f"{numbers.tasks_in_flight} held by producers, {numbers.tasks_issued} issued, {numbers.tasks_granted} granted"
    rows.add_row("tasks", f"{tasks}, {numbers.tasks_ended} ended")
    rows.add_row("tokens", f"{short(numbers.tokens_made)} sampled, {short(numbers.tokens_trained)} in trained batches, prompts included")
    return _fitted(rows)


def _times(shares: Mapping[str, float]) -> Table:
    """Who starved, and the states of each kind of worker, the longest first; those below half a per cent are left out."""
    rows = Table.grid(padding=(0, 2))
    for title, prefix in _TIMES.items():
        parts = {name.removeprefix(prefix): value for name, value in shares.items() if name.startswith(prefix)}
        said = [(state, value) for state, value in parts.items() if value >= _LEAST_SHARE]
        if parts:
            words = [f"{state.replace('_', ' ')} {value:.0%}" for state, value in sorted(said, key=lambda one: -one[1])]
            rows.add_row(title, "  ".join(words) or "nobody")
    return _fitted(rows)


def _goodput(tokens: Mapping[str, float]) -> Table:
    """What became of what was sampled, and of what was stored."""
    rows = Table.grid(padding=(0, 2))
    dropped = {name.rpartition("/")[2]: count for name, count in tokens.items() if name.startswith("tokens/dropped_total/") and count}
    reasons = ", ".join(f"{reason} {short(count)}" for reason, count in sorted(dropped.items(), key=lambda one: -one[1]))
    for title, names in _ENDS.items():
        words = [f"{word} {short(tokens.get(name, 0.0))}" for word, name in names.items() if name in tokens or name.endswith("_total")]
        rows.add_row(title, "  ".join(words))
    rows.add_row("dropped", f"{short(sum(dropped.values()))}" + (f" ({reasons})" if reasons else ""))
    return _fitted(rows)


def _drops(numbers: RunNumbers) -> Table:
    table = _table("reason", "rollouts", "part", numeric=("rollouts", "part"))
    for reason, count in sorted(numbers.drops.items(), key=lambda item: -item[1]):
        table.add_row(Text(visible(reason)), str(count), f"{count / max(1, numbers.dropped):.0%}")
    return table


def _lengths(numbers: RunNumbers) -> list[RenderableType]:
    """A bar for lengths of a certain ratio; each row against its own greatest."""
    least, counts = side_by_side(numbers.lengths, _MOST_BARS)
    values = quantiles(numbers.lengths)
    table = _table("answers", "p50", "p95", f"{least[0]} to {least[-1] - 1} tokens", numeric=("p50", "p95"))
    for name in LENGTHS:
        of = counts.get(name, [])
        cells = [f"{values[key]:.0f}" if (key := length_quantile(name, word)) in values else "-" for word in ("p50", "p95")]
        table.add_row(name.partition("/")[2], *cells, sparkline([count / max(1, *of) for count in of]) if any(of) else "-")
    return [table, Text(distance_text(numbers.length_distance, cut=numbers.length_cut))]


def _sample(one: SampleLine) -> list[RenderableType]:
    reward = "-" if one.reward is None else decimal(one.reward)
    head = f"{one.task}/{one.rollout} reward {reward}"
    return [Text(f"{head}  {one.prompt}", style="dim"), Text(f"  > {one.answer}")]
