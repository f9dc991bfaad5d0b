"""What people read of a run: plain lines in a pipe, and the words of the board in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from streamrl.monitor.drawing import Cell, Line, Part, visible
from streamrl.monitor.failures import Count
from streamrl.monitor.numbers import Evaluation, RunNumbers, WorkerLine, is_producer
from streamrl.monitor.slo import line_of
from streamrl.monitor.waits import credits_of, graders_line, hung_line, standing_line
from streamrl.runtime.worker import is_loading

if TYPE_CHECKING:
    from streamrl.monitor.view import RunView

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_EVERY_S = 3.0
_SETS_SHOWN = 3
_AT_WORK = ("waits for", "trains", "follows", "evaluates", "goes through")
"""How states begin that are no trouble by themselves; a run in which nothing moves is said as a whole."""


class Display(Protocol):
    """Where a run is shown: its numbers about once a second, what has happened, and where its page is."""

    def __enter__(self) -> Display: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
    def show(self, numbers: RunNumbers, view: RunView) -> None: ...
    def note(self, text: str) -> None: ...
    def page(self, address: str) -> None: ...


class PlainLines:
    """One line every few seconds, and one for each note."""

    def __init__(self, out: TextIO | None = None, *, every_s: float = _PLAIN_EVERY_S) -> None:
        self._out = out or sys.stdout
        self._every_s = every_s
        self._next_s = 0.0

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def show(self, numbers: RunNumbers, view: RunView | None = None) -> None:
        """Print the numbers, but not more often than every few seconds."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            say(plain_line(numbers, now_s=time.time()), self._out)

    def note(self, text: str) -> None:
        """Print one line."""
        say(f"[{time.strftime('%H:%M:%S')}] {text}", self._out)

    def page(self, address: str) -> None:
        """Print where the page is."""
        self.note(f"page: {address}")


def say(text: str, out: TextIO) -> None:
    """Print one line: a point for what a terminal takes for a command, and `?` for letters that `out` has not."""
    letters = out.encoding or "utf-8"
    print(visible(text).encode(letters, "replace").decode(letters), file=out, flush=True)


def summary_rows(numbers: RunNumbers) -> list[tuple[Part, Cell]]:
    """What the board says of a run as a whole: words and values."""
    rows: list[tuple[str, Cell]] = [
        ("step", progress(numbers)),
        ("reward", reward_line(numbers)) if numbers.loss is None else ("loss", f"{decimal(numbers.loss)} nats a token"),
        (
            "tokens",
            f"made {short(numbers.made_per_s)}/s ({short(numbers.tokens_made)})   "
            f"trained {short(numbers.trained_per_s)}/s ({short(numbers.tokens_trained)})",
        ),
        ("staleness", staleness_text(numbers)),
        (
            "stream",
            f"lag {numbers.stream_lag} messages, {short(numbers.stream_bytes)}B   swaps {numbers.swaps}   "
            f"tasks {numbers.tasks_ended} ended of {numbers.tasks_granted}",
        ),
        ("dropped", drops_text(numbers.dropped, numbers.drops)),
    ]
    return [(Part(word, "bold cyan"), said) for word, said in rows]


def warnings(numbers: RunNumbers) -> list[tuple[str, str]]:
    """What people should look at, each with the word that it stands behind."""
    found: list[tuple[str, str]] = []
    if numbers.stalled:
        waiting = ", ".join(numbers.stalled)
        found.append(("full", f"the sample stream, or the room for its blobs, is full; {waiting} wait for the trainer to free room"))
    if held := hung_line(numbers):
        found.append(("hung", held))
    if stuck := graders_line(numbers):
        found.append(("hung", stuck))
    if numbers.standing:
        found.append(("waits", standing_line(numbers.standing)))
    found += [("slo", line_of(one)) for one in numbers.slo]
    return found


def progress(numbers: RunNumbers) -> str:
    """Step, warm-up and version."""
    steps = f"{numbers.step}/{numbers.steps}" if numbers.steps else str(numbers.step)
    warmup = f"warm-up {numbers.warmup_step}" if numbers.warmup_step else ""
    if warmup and numbers.answer_probability is not None and numbers.phase == "warm-up":
        warmup += f" (whole answers {numbers.answer_probability:.2f})"
    pace = "" if numbers.steps_per_minute is None else f"{numbers.steps_per_minute:.3g} a minute"
    return "   ".join(part for part in (steps, warmup, f"version {numbers.version}", left_text(numbers), pace) if part)


def left_text(numbers: RunNumbers) -> str:
    """Time to the end of the run; `-` where it cannot be said yet, and nothing where no end is set or it is there."""
    if not numbers.steps or numbers.step >= numbers.steps or numbers.phase == "finished":
        return ""
    return f"left {clock(numbers.left_s) if numbers.left_s is not None else '-'}"


def reward_line(numbers: RunNumbers) -> Line:
    """Reward as a sparkline with its newest mean, and the held-out accuracy."""
    line = [Part(sparkline(numbers.rewards), "green")]
    line.append(Part(f"  {decimal(numbers.reward)}" if numbers.reward is not None else "-", "bold"))
    if numbers.heldout is not None:
        line.append(Part(f"   held-out {decimal(numbers.heldout)}{interval_text(numbers.heldout_interval)}{by_text(numbers.heldout_by)}"))
    told = [evaluation_text(one) for one in numbers.evaluations]
    line += [Part(f"   {text}") for text in told[:_SETS_SHOWN]]
    if len(told) > _SETS_SHOWN:
        line.append(Part(f"   and {len(told) - _SETS_SHOWN} sets more"))
    return line


def interval_text(interval: tuple[float, float] | None) -> str:
    """A 95 % interval behind its mean; empty where it is not known."""
    return "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"


def by_text(versions: str) -> str:
    """The versions that answered an evaluation (`Evaluation.answered_by`) behind its mean; empty where they are its own."""
    return f" (by {visible(versions)})" if versions else ""


def evaluation_text(one: Evaluation) -> str:
    """The newest mean of a set of problems, with its largest pass@k, and the versions that answered where they are others."""
    text = f"{one.set} {'-' if one.accuracy is None else decimal(one.accuracy)}"
    k = max(one.passes, default=1)
    return (f"{text} (pass@{k} {decimal(one.passes[k])})" if k > 1 else text) + by_text(one.answered_by)


def staleness_text(numbers: RunNumbers) -> str:
    """Age of the trained rollouts over the run and, for the newest batch, its parts; in versions."""
    parts = (
        ("in flight", numbers.staleness_in_flight),
        ("queued", numbers.staleness_queued),
        ("publish lag", numbers.staleness_publish_lag),
    )
    known = ", ".join(f"{name} {value:.2f}" for name, value in parts if value is not None)
    return f"p50 {numbers.staleness_p50:g}  max {numbers.staleness_max}" + (f"   ({known})" if known else "")


def drops_text(dropped: int, drops: Mapping[str, int]) -> str:
    """Number of rollouts dropped, and why."""
    reasons = ", ".join(f"{visible(reason)} {count}" for reason, count in sorted(drops.items(), key=lambda item: -item[1]))
    return f"{dropped} ({reasons})" if reasons else str(dropped)


def failed_line(numbers: RunNumbers, count: Count) -> str:
    """Say what has failed (`Failures.to_say`), and whose tasks those were where other producers have had none that failed."""
    since = "since the newest batch" if numbers.failed_tasks else "beside those that were trained"
    said = f"{count.num_tasks} tasks have failed {since}; the newest: {one_line(numbers.newest_error)}"
    if not count.producers or not any(is_producer(one.worker) and one.worker not in count.producers for one in numbers.workers):
        return said
    whose = ", ".join(one_line(name, most=60) for name, _ in count.producers.most_common(3))
    return f"{said}; all by {whose}. hint: stop and mend it; the run goes on while others give samples, without these tasks"


def row_line(row: str) -> str:
    """A row of the data that was dropped, one of `RunNumbers.unusable_rows`."""
    return f"a row of the data was dropped, {one_line(row, most=500)}"


def is_normal(state: str) -> bool:
    """Whether a worker in this state is at work, loads, or waits for what others are at."""
    return state in ("running", "done") or is_loading(state) or state.startswith(_AT_WORK)


def _told(worker: WorkerLine, now_s: float) -> str:
    """A worker's state, and for how long it has been loading."""
    known = is_loading(worker.state) and worker.since_s and now_s
    seconds = f" ({max(0.0, now_s - worker.since_s):.0f} s)" if known else ""
    return f"{worker.worker}:{worker.state.replace(': ', ' ', 1) if seconds else worker.state}{seconds}"


def degraded_lines(numbers: RunNumbers) -> list[str]:
    """A line for each engine that does something otherwise than it was asked to."""
    return [f"{engine.engine}: {engine.degraded}" for engine in numbers.engines if engine.degraded]


def plain_line(numbers: RunNumbers, *, now_s: float = 0.0) -> str:
    """The numbers of a run as one line; `now_s`: Unix seconds, 0 where it does not matter for how long something has been so."""
    steps = f"{numbers.step}/{numbers.steps}" if numbers.steps else str(numbers.step)
    fields = [numbers.phase, f"step={steps}"]
    if numbers.warmup_step:
        fields.append(f"warmup={numbers.warmup_step}")
    if numbers.phase == "warm-up" and numbers.answer_probability is not None:
        fields.append(f"answers={numbers.answer_probability:.3f}")
    fields.append(f"version={numbers.version}")
    if numbers.reward is not None:
        fields.append(f"reward={decimal(numbers.reward)}")
    if numbers.loss is not None:
        fields.append(f"loss={decimal(numbers.loss)}")
    if numbers.heldout is not None:
        fields.append(f"heldout={decimal(numbers.heldout)}")
    fields += [f"{one.set}={decimal(one.accuracy)}" for one in numbers.evaluations[:_SETS_SHOWN] if one.accuracy is not None]
    if left := left_text(numbers):
        fields.append(left.replace(" ", "="))
    fields += [
        f"made={short(numbers.made_per_s)}/s",
        f"trained={short(numbers.trained_per_s)}/s",
        f"staleness={numbers.staleness_p50:g}/{numbers.staleness_max}",
        f"lag={numbers.stream_lag}",
        f"tasks={numbers.tasks_ended}/{numbers.tasks_granted}",
        f"dropped={numbers.dropped}",
        *([] if numbers.length_distance is None else [f"lengths={numbers.length_distance:.2f}"]),
        f"swaps={numbers.swaps}",
    ]
    if numbers.failed_tasks:
        fields.append(f"failed-tasks={numbers.failed_tasks}")
    if numbers.stalled:
        fields.append(f"stream-full={','.join(numbers.stalled)}")
    if hung_line(numbers):
        fields.append(f"hung={numbers.hung_tasks}/{credits_of(numbers)}")
    told = [_told(worker, now_s) for worker in numbers.workers if is_loading(worker.state) or not is_normal(worker.state)]
    if told:
        fields.append(f"workers={','.join(told)}")
    if degraded := [engine.engine for engine in numbers.engines if engine.degraded]:
        fields.append(f"degraded={','.join(degraded)}")
    if numbers.slo:
        fields.append(f"slo={','.join(f'{one.level}:{one.objective}' for one in numbers.slo)}")
    if numbers.standing:
        fields.append(f"waits-for={numbers.standing.what!r}")
    return f"[{clock(numbers.elapsed_s)}] " + " ".join(fields)


def sparkline(values: Sequence[float]) -> str:
    """One bar a value, between the smaller of 0 and their minimum and the larger of 1 and their maximum."""
    low, high = min((0.0, *values)), max((1.0, *values))
    highest = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / (high - low) * highest)] for value in values)


def one_line(text: str, *, most: int = 200) -> str:
    """`text` without line breaks and what a terminal takes for a command, cut to `most` characters."""
    line = visible(" ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."


def decimal(value: float) -> str:
    """Three decimals; of large numbers the leading digits."""
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3e}"


def short(count: float) -> str:
    """A count with at most four characters of digits: 950, 12.3k, 4.5M."""
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= bound:
            return f"{count / bound:.1f}{unit}"
    return f"{count:.0f}"


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours when there are any."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
