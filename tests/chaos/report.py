"""Put the tables of chaos logs into docs/reliability.md: `python -m tests.chaos.report runs/chaos/*.jsonl`."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.chaos.log import FaultLine, Line, RunLine, SessionLine, read
from tests.faults.faults import KINDS, PARTS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- made by tests/chaos/report.py -->", "<!-- end -->"
HEAD = (
    "| {first} | fault | strikes | held [s] | recovery, median / max [s] | after it had ended, max [s] | recovered | in runs judged right |"
)


class Strike:
    """One strike and what was found of its run."""

    def __init__(self, line: FaultLine, run: RunLine | None) -> None:
        self.line = line
        self.right = run is not None and not run.problems

    @property
    def recovered(self) -> bool:
        return self.line.recovery_s >= 0

    @property
    def afterwards_s(self) -> float:
        """Seconds from the end of the fault to the next batch; 0: there was one before."""
        return max(0.0, self.line.recovery_s - self.line.held_s)


def strikes_of(lines: Sequence[Line]) -> list[Strike]:
    """The strikes of one log."""
    runs = {line.run: line for line in lines if isinstance(line, RunLine)}
    return [Strike(line, runs.get(line.run)) for line in lines if isinstance(line, FaultLine)]


def table(strikes: Iterable[Strike], first: str, name: Callable[[Strike], str], order: Sequence[str] = ()) -> list[str]:
    """One row for each name and fault."""
    groups: dict[tuple[str, str], list[Strike]] = defaultdict(list)
    for strike in strikes:
        groups[name(strike), strike.line.fault].append(strike)
    place = {text: number for number, text in enumerate(order)}
    keys = sorted(groups, key=lambda key: (place.get(key[0], len(place)), key[0], KINDS.index(key[1])))
    rows = [HEAD.format(first=first), "|---" * HEAD.count(" | ") + "|---|"]
    return rows + [row(*key, groups[key]) for key in keys]


def row(name: str, fault: str, group: Sequence[Strike]) -> str:
    """Numbers of one kind of strike."""
    held = sorted({strike.line.held_s for strike in group})
    times = [strike.line.recovery_s for strike in group if strike.recovered] or [float("nan")]
    after = max((strike.afterwards_s for strike in group), default=0.0)
    recovered, right = (sum(getattr(strike, what) for strike in group) for what in ("recovered", "right"))
    cells = (
        name,
        fault,
        str(len(group)),
        " or ".join(f"{each:g}" for each in held) if any(held) else "",
        f"{statistics.median(times):.2f} / {max(times):.2f}",
        f"{after:.2f}",
        f"{recovered} of {len(group)}",
        f"{right} of {len(group)}",
    )
    return "| " + " | ".join(cells) + " |"


def runs_table(runs: Sequence[RunLine]) -> list[str]:
    """What the audit, the replay and the comparison found of the runs."""
    rows = ["| runs | number | batches | samples messages | judged right |", "|---|---|---|---|---|"]
    for shape in dict.fromkeys(run.shape for run in runs):
        group = [run for run in runs if run.shape == shape]
        batches, messages = (sum(run.counts.get(what, 0) for run in group) for what in ("versions", "messages"))
        right = sum(not run.problems for run in group)
        rows.append(f"| {shape} | {len(group)} | {batches} | {messages} | {right} of {len(group)} |")
    problems = [f"- run {run.run} ({run.shape}): {problem.splitlines()[0]}" for run in runs for problem in run.problems]
    return rows + (["", "Problems found:", "", *problems] if problems else [])


def report(logs: Sequence[Sequence[Line]]) -> str:
    """The tables as Markdown."""
    strikes = [strike for lines in logs for strike in strikes_of(lines)]
    runs = [line for lines in logs for line in lines if isinstance(line, RunLine)]
    sessions = [line for lines in logs for line in lines if isinstance(line, SessionLine)]
    moments = [strike for strike in strikes if strike.line.moment != "random" and not strike.line.moment.startswith("random (")]
    aimless = [strike for strike in strikes if strike.line.moment.startswith("random")]
    hardware = " and ".join(dict.fromkeys(f"{line.hardware}, Python {line.python}" for line in sessions))
    together = f" ({len(sessions)} sessions)" if len(sessions) > 1 else ""
    parts = [
        f"{len(strikes)} faults in {len(runs)} runs{together}, {', '.join(dict.fromkeys(line.date for line in sessions))}, on {hardware}:"
    ]
    parts += ["", *(f"- `{line.command}`" for line in sessions)]
    parts += ["", "### At random moments", "", *table(aimless, "part", lambda strike: strike.line.part, PARTS)]
    by_moment = table(moments, "in the writing of", lambda strike: strike.line.moment.partition(" ")[2])
    parts += [
        "",
        "### Inside writes",
        "",
        "*Before*, *within* and *after* in turn; one strike in four falls on who is sent to (the nats-server; for requests the engine), "
        "the others on the sender.",
        "",
        *by_moment,
        "",
        "### What was found of the runs",
        "",
        *runs_table(runs),
    ]
    return "\n".join(parts)


def main() -> int:
    """Rewrite the page's tables."""
    parser = argparse.ArgumentParser(description="Put the tables of chaos logs into docs/reliability.md.")
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--print", action="store_true", help="to the terminal only")
    given = parser.parse_args()
    made = report([read(path) for path in given.logs])
    if given.print:
        sys.stdout.write(made + "\n")
        return 0
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
