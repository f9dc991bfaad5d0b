"""What `streamrl top` shows, and `streamrl up` on a terminal, as lines no wider than there is room: nothing wraps. No terminal, no bus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from streamrl.monitor.drawing import Cell, Ink, Line, Part, columns, fitted, folded, painted, parts_of
from streamrl.monitor.failed_share import line_of_numbers
from streamrl.monitor.glance import account_words
from streamrl.monitor.lengths import distance_text, quantiles, side_by_side
from streamrl.monitor.look import Look, SampleLine
from streamrl.monitor.numbers import EngineLine, RunNumbers, WorkerLine
from streamrl.monitor.screen import clock, decimal, degraded_lines, is_normal, row_line, short, sparkline, summary_rows, warnings
from streamrl.monitor.slo import worst_of
from streamrl.monitor.summary import summary_line
from streamrl.telemetry.names import LENGTHS, length_quantile

_FEWEST_LINES = 3
"""Head, one line of what is below it, foot."""
_MOST_BARS = 40
_AGES = {
    "age, batch": {"p50": "staleness/p50", "p95": "staleness/p95", "max": "staleness/max"},
    "its samples": {"p50": "staleness/sample_p50", "p95": "staleness/sample_p95", "max": "staleness/sample_max"},
    "made of": {"in flight": "staleness/in_flight", "queued": "staleness/queued", "publish lag": "staleness/publish_lag"},
}
"""Of the newest batch."""
_TIMES = {"starved": "starvation/", "trainer": "trainer/share/", "slots": "producer/share/", "engines": "engine/share/"}
_LEAST_SHARE = 0.005
_GREEDY = "tokens/greedy_total"
_ENDS = {
    "sampled": {
        "all": "tokens/sampled_total",
        "published": "tokens/published_total",
        "greedy": _GREEDY,
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
        ink: what they may be written with.
    """

    def __init__(self, look: Look, width: int, ink: Ink) -> None:
        self._look, self._width, self._ink = look, max(1, width), ink
        self.lines: list[Line] = []
        self.starts: list[int] = []
        """Where each section begins."""
        for title, lines in _sections(look, self._width):
            self.starts.append(len(self.lines))
            if title:
                self.lines.append([Part(title, "bold reverse")])
            self.lines += lines

    def last_start(self, height: int) -> int:
        """The last line that may be the first shown, on a screen of `height` lines."""
        return max(0, len(self.lines) - max(1, height - 2))

    def frame(self, place: Place, height: int, keys: str = "") -> list[str]:
        """The `height` lines of a screen: head, a part of the board, foot; with the terminal's codes for colours.

        `keys` are named in the foot before those that move.
        """
        height = max(_FEWEST_LINES, height)
        first = min(place.line, self.last_start(height))
        shown = self.lines[first : first + height - 2]
        above = f"lines {first + 1}-{first + len(shown)} of {len(self.lines)}"
        # What is cut on a narrow screen is how to move.
        foot = f"{keys}p {'go on' if place.paused else 'pause'}  {above}  arrows, pages scroll  tab section"
        blank: list[Line] = [()] * (height - 2 - len(shown))
        return [self._painted(line) for line in (_head(self._look, paused=place.paused), *shown, *blank, [Part(foot, "dim")])]

    def text(self) -> list[str]:
        """All lines, the head first."""
        return [self._painted(line) for line in (_head(self._look, paused=False), *self.lines)]

    def _painted(self, line: Line) -> str:
        return painted(fitted(line, self._width), self._ink)


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


def _head(look: Look, *, paused: bool) -> Line:
    numbers = look.numbers
    line = [Part("streamrl ", "bold"), Part(look.run, "bold cyan")]
    line.append(Part(f"  {numbers.phase if numbers and look.state == 'running' else look.state}"))
    if numbers:
        line.append(Part(f"  {clock(numbers.elapsed_s)}  version {numbers.version}"))
        level = worst_of(*(one.level for one in numbers.slo))
        line.append(Part(f"  slo {level}", {"ok": "green", "warn": "yellow"}.get(level, "bold red")))
    if paused:
        line.append(Part("  paused", "yellow"))
    if look.away:
        line.append(Part(f"  {look.away}", "bold red"))
    return parts_of(line)


def _sections(look: Look, width: int) -> list[tuple[str, list[Line]]]:
    numbers = look.numbers
    notes = _told(look.notes, "dim", width)
    if numbers is None:
        said = "nothing is known of it yet" if look.summary is None else summary_line(look.summary)
        return [("", [*_told([said], "", width), *notes])]
    tables: list[tuple[str, list[Line]]] = [
        ("", [*_told(_verdict(numbers), "bold", width), *columns(summary_rows(numbers), width), *_told(_account(numbers), "", width)]),
        ("alerts", _told(_alerts(numbers), "yellow", width)),
        ("notes", notes),
        ("newest failure", _told(_failures(numbers), "red" if numbers.failed_tasks else "", width)),
        ("engines", _engines(numbers.engines, width) or [[Part("none")]]),
        ("workers", _workers(numbers.workers, look.now_s, width) or [[Part("none")]]),
        ("lag", columns(_lag(look, numbers), width)),
        ("time, newest window", columns(_times(look.shares), width)),
        ("tokens, last minute", columns(_goodput(look.goodput), width)),
        ("dropped", _drops(numbers, width) or [[Part("nothing")]]),
        ("lengths", _lengths(numbers, width)),
        ("samples", [line for one in look.samples for line in _sample(one)]),
    ]
    return [(title, lines) for title, lines in tables if lines]


def _table(titles: Sequence[str], rows: Sequence[Sequence[Cell]], width: int, *, numeric: Sequence[str] = ()) -> list[Line]:
    """Rows below their titles; nothing where there are none."""
    right = frozenset(titles.index(title) for title in numeric)
    return columns([[Part(title, "dim") for title in titles], *rows], width, right=right) if rows else []


def _told(texts: Iterable[str], style: str, width: int) -> list[Line]:
    """Texts of which nothing may be cut: what to do stands at their end."""
    return [[Part(line, style)] for text in texts for line in folded(text, width)]


def _verdict(numbers: RunNumbers) -> list[str]:
    return [numbers.verdict.text] if numbers.verdict is not None else []


def _account(numbers: RunNumbers) -> list[str]:
    words = account_words(numbers.account)
    return ["; ".join(words)] if words else []


def _alerts(numbers: RunNumbers) -> list[str]:
    return [*(f"{word}: {said}" for word, said in warnings(numbers)), *degraded_lines(numbers)]


def _failures(numbers: RunNumbers) -> list[str]:
    """The newest, without line breaks; behind the notes, for it may be long."""
    newest = [" ".join(numbers.newest_error.split())] if numbers.newest_error else []
    share = line_of_numbers(numbers)
    return [*([share] if share else []), *newest, *map(row_line, numbers.unusable_rows)]


def _engines(engines: Sequence[EngineLine], width: int) -> list[Line]:
    rows: list[tuple[str, ...]] = []
    for one in engines:
        behind = "" if one.behind is None else str(one.behind)
        hits = "" if one.prefix_hits is None else f"{one.prefix_hits:.0%}"
        rows.append((one.engine, one.serving, behind, f"{one.running}/{one.slots}", str(one.waiting), short(one.tokens_per_s), hits))
    titles = ("engine", "serves", "behind", "slots", "waiting", "tok/s", "prefix hits")
    return _table(titles, rows, width, numeric=("behind", "waiting", "tok/s"))


def _workers(workers: Sequence[WorkerLine], now_s: float, width: int) -> list[Line]:
    rows: list[tuple[Cell, ...]] = []
    any_failed = any(one.failed_rollouts for one in workers)
    for one in workers:
        since = clock(max(0.0, now_s - one.since_s)) if one.since_s else ""
        where = f"{one.pid or ''} {one.host}".strip()
        state = Part(one.state, "" if is_normal(one.state) else "yellow")
        failed = (Part(str(one.failed_rollouts or ""), "yellow"),) if any_failed else ()
        rows.append((one.worker, state, since, str(one.restarts or ""), *failed, where))
    return _table(("worker", "state", "since", "restarts", *(("failed lately",) if any_failed else ()), "process"), rows, width)


def _lag(look: Look, numbers: RunNumbers) -> list[tuple[str, str]]:
    budget = f" of {short(look.samples_bytes)}B" if look.samples_bytes else ""
    tokens = "" if numbers.stream_tokens is None else f", {short(numbers.stream_tokens)} tokens not trained or dropped"
    stream = f"{numbers.stream_lag} messages, the oldest {numbers.stream_s:.1f} s; {short(numbers.stream_bytes)}B{budget}{tokens}"
    ages = f"p50 {numbers.staleness_p50:g}  p95 {numbers.staleness_p95:g}  max {numbers.staleness_max} versions"
    rows = [("stream", stream), ("age, run", ages)]
    for title, names in _AGES.items():
        words = [f"{word} {look.lag[name]:.4g}" for word, name in names.items() if name in look.lag]
        if words:
            rows.append((title, "  ".join(words) + " versions"))
    behind = [one.behind for one in numbers.engines if one.behind is not None]
    if behind:
        rows.append(("engines", f"{min(behind)} to {max(behind)} versions behind"))
    if (commit_s := look.lag.get("lag/publish_to_commit_s")) is not None:
        rows.append(("weights", f"{commit_s:.2f} s from publish to commit"))
    tasks = f"{numbers.tasks_in_flight} held by producers, {numbers.tasks_issued} issued, {numbers.tasks_granted} granted"
    rows.append(("tasks", f"{tasks}, {numbers.tasks_ended} ended"))
    if numbers.ungraded:
        rows.append(("rewards", f"{numbers.ungraded} groups have asked for theirs and have none"))
    rows.append(("tokens", f"{short(numbers.tokens_made)} sampled, {short(numbers.tokens_trained)} in trained batches, prompts included"))
    return rows


def _times(shares: Mapping[str, float]) -> list[tuple[str, str]]:
    """Who starved, and the states of each kind of worker, the longest first; those below half a per cent are left out."""
    rows: list[tuple[str, str]] = []
    for title, prefix in _TIMES.items():
        parts = {name.removeprefix(prefix): value for name, value in shares.items() if name.startswith(prefix)}
        said = [(state, value) for state, value in parts.items() if value >= _LEAST_SHARE]
        if parts:
            words = [f"{state.replace('_', ' ')} {value:.0%}" for state, value in sorted(said, key=lambda one: -one[1])]
            rows.append((title, "  ".join(words) or "nobody"))
    return rows


def _goodput(tokens: Mapping[str, float]) -> list[tuple[str, str]]:
    """What became of what was sampled, and of what was stored."""
    if not tokens:
        return []
    rows: list[tuple[str, str]] = []
    dropped = {name.rpartition("/")[2]: count for name, count in tokens.items() if name.startswith("tokens/dropped_total/") and count}
    reasons = ", ".join(f"{reason} {short(count)}" for reason, count in sorted(dropped.items(), key=lambda one: -one[1]))
    for title, names in _ENDS.items():
        shown = {word: name for word, name in names.items() if name in tokens or (name.endswith("_total") and name != _GREEDY)}
        words = [f"{word} {short(tokens.get(name, 0.0))}" for word, name in shown.items()]
        rows.append((title, "  ".join(words)))
    rows.append(("dropped", f"{short(sum(dropped.values()))}" + (f" ({reasons})" if reasons else "")))
    return rows


def _drops(numbers: RunNumbers, width: int) -> list[Line]:
    drops = sorted(numbers.drops.items(), key=lambda item: -item[1])
    rows = [(reason, str(count), f"{count / max(1, numbers.dropped):.0%}") for reason, count in drops]
    return _table(("reason", "rollouts", "part"), rows, width, numeric=("rollouts", "part"))


def _lengths(numbers: RunNumbers, width: int) -> list[Line]:
    """A bar for lengths of a certain ratio; each row against its own greatest."""
    if not numbers.lengths:
        return []
    least, counts = side_by_side(numbers.lengths, _MOST_BARS)
    values = quantiles(numbers.lengths)
    rows: list[tuple[str, ...]] = []
    for name in LENGTHS:
        of = counts.get(name, [])
        cells = [f"{values[key]:.0f}" if (key := length_quantile(name, word)) in values else "-" for word in ("p50", "p95")]
        rows.append((name.partition("/")[2], *cells, sparkline([count / max(1, *of) for count in of]) if any(of) else "-"))
    titles = ("answers", "p50", "p95", f"{least[0]} to {least[-2]}+ tokens")
    return [*_table(titles, rows, width, numeric=("p50", "p95")), [Part(distance_text(numbers.length_distance, cut=numbers.length_cut))]]


def _sample(one: SampleLine) -> list[Line]:
    reward = "-" if one.reward is None else decimal(one.reward)
    head = Part(f"{one.task}/{one.rollout} reward {reward}  {one.prompt}", "dim")
    return [parts_of(head), parts_of(f"  > {one.answer}")]
