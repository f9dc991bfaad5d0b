"""Put the tables of chaos logs into docs/reliability.md: `python -m tests.chaos.report runs/chaos/*.jsonl`.

With `--part ranks` all of them go to the part of that name: a session of one kind of run, beside those of all kinds.
"""

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.chaos.log import FaultLine, Line, RunLine, SessionLine, SpeedLine, read
from tests.support.world.faults import AGENT, GATEWAY, GRADER, KINDS, PARTS, RANK_1, WHOLE
from tests.support.world.misdeeds import ENDS
from tests.support.world.shapes import DEFAULTS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- {part}: begin (written by tests/chaos/report.py) -->", "<!-- {part}: end -->"
EVERYBODY = (*PARTS, GRADER, RANK_1, GATEWAY, AGENT, WHOLE)
USER_CODE = "user code"
MISDEEDS = {
    "user code that hangs": frozenset({"timeout"}),
    "user code that ends its process": frozenset({"deliveries"}),
    "user code that raises or calls sys.exit": frozenset({"failed"}),
    "user code that prints 1 MB": frozenset({"sample"}),
}
"""Kinds of misdeeds, by how such a rollout ends."""
HEAD = (
    "| {first} | fault | strikes | held [s] | recovery, median / max [s] | after it had ended, max [s] | recovered | in runs judged right |"
)
INSIDE = (
    "*Before*, *within* and *after* in turn; one strike in four falls on who is sent to (the nats-server; for requests the engine), "
    "the others on the sender."
)


class Strike:
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

    @property
    def killed(self) -> str:
        """What the first table calls it; empty: it is not in there."""
        if self.line.part == USER_CODE:
            return next(name for name, ends in MISDEEDS.items() if ends & ENDS[self.line.fault])
        if self.line.fault == "damage":
            return f"{self.line.part}, {self.line.moment.removeprefix('random, ')}"
        return self.line.part if self.line.fault == "kill -9" else ""


def strikes_of(lines: Sequence[Line]) -> list[Strike]:
    runs = {line.run: line for line in lines if isinstance(line, RunLine)}
    return [Strike(line, runs.get(line.run)) for line in lines if isinstance(line, FaultLine)]


def progress(strikes: Sequence[Strike]) -> list[str]:
    """One row for everything that is killed: seconds to the next batch, with default settings and with short limits."""
    numbers = " | ".join(("n", "median [s]", "p95 [s]", "max [s]"))
    rows = [f"| killed | default settings: {numbers} | short limits: {numbers} |", "|---" * 9 + "|"]
    damages = sorted({strike.killed for strike in strikes if strike.line.fault == "damage"})
    names = (*EVERYBODY, *(name for name in damages if "(" not in name), *MISDEEDS)
    for name in names:
        found = [strike for strike in strikes if strike.killed == name]
        if found:
            halves = [[s for s in found if (s.line.shape == DEFAULTS.name) == default] for default in (True, False)]
            rows.append(f"| {name} | " + " | ".join(" | ".join(spread([s.line.recovery_s for s in half])) for half in halves) + " |")
    return rows


def spread(times: Sequence[float]) -> tuple[str, str, str, str]:
    """Number, median, 95th percentile and maximum of those that are there; -1 is none."""
    known = sorted(time for time in times if time >= 0)
    if not known:
        return str(len(times) or ""), "", "", ""
    late = known[min(len(known) - 1, math.ceil(0.95 * len(known)) - 1)]
    return str(len(times)), f"{statistics.median(known):.2f}", f"{late:.2f}", f"{known[-1]:.2f}"


def speeds(strikes: Sequence[Strike], lines: Sequence[SpeedLine]) -> list[str]:
    """How fast undisturbed runs train, and how soon those who come back take part again."""
    rows = ["| run | samples/s | wall ms a sample | processor ms a sample |", "|---|---|---|---|"]
    for shape in dict.fromkeys(line.shape for line in lines):
        of = [line for line in lines if line.shape == shape]
        samples, wall_s, processor_s = (sum(getattr(line, what) for line in of) for what in ("samples", "wall_s", "processor_s"))
        rows.append(f"| {shape} | {samples / wall_s:.0f} | {1000 * wall_s / samples:.2f} | {1000 * processor_s / samples:.2f} |")
    rows += ["", "| comes back | n | median [s] | p95 [s] | max [s] |", "|---|---|---|---|---|"]
    struck = [strike.line for strike in strikes]
    back = {
        "a killed engine: until a producer is connected to its successor": [one.engine_s for one in struck],
        "a killed attached producer: from `streamrl attach` to its first samples on the server": [one.attach_s for one in struck],
        "the whole run: from `streamrl up` to the next entry of its ledger": [one.recovery_s for one in struck if one.part == WHOLE],
    }
    known = {name: [time for time in times if time >= 0] for name, times in back.items()}
    return rows + [f"| {name} | " + " | ".join(spread(times)) + " |" for name, times in known.items()]


def table(strikes: Iterable[Strike], first: str, name: Callable[[Strike], str], order: Sequence[str] = ()) -> list[str]:
    """One row for each name and fault."""
    groups: dict[tuple[str, str], list[Strike]] = defaultdict(list)
    for strike in strikes:
        groups[name(strike), strike.line.fault].append(strike)
    place = {text: number for number, text in enumerate(order)}
    keys = sorted(groups, key=lambda key: (place.get(key[0], len(place)), key[0], KINDS.index(key[1]) if key[1] in KINDS else len(KINDS)))
    rows = [HEAD.format(first=first), "|---" * HEAD.count(" | ") + "|---|"]
    return rows + [row(*key, groups[key]) for key in keys]


def row(name: str, fault: str, group: Sequence[Strike]) -> str:
    held = sorted({strike.line.held_s for strike in group})
    times = [strike.line.recovery_s for strike in group if strike.recovered] or [float("nan")]
    after = max((strike.afterwards_s for strike in group), default=0.0)
    recovered, right = (sum(getattr(strike, what) for strike in group) for what in ("recovered", "right"))
    held_s = " or ".join(f"{each:g}" for each in held) if any(held) else ""
    recovery = f"{statistics.median(times):.2f} / {max(times):.2f}"
    cells = (name, fault, str(len(group)), held_s, recovery, f"{after:.2f}", *(f"{one} of {len(group)}" for one in (recovered, right)))
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


def report(logs: Sequence[Sequence[Line]]) -> dict[str, str]:
    strikes = [strike for lines in logs for strike in strikes_of(lines)]
    runs = [line for lines in logs for line in lines if isinstance(line, RunLine)]
    sessions = [line for lines in logs for line in lines if isinstance(line, SessionLine)]
    speed_lines = [line for lines in logs for line in lines if isinstance(line, SpeedLine)]
    moments = [strike for strike in strikes if not strike.line.moment.startswith("random")]
    aimless = [strike for strike in strikes if strike.line.moment.startswith("random") and strike.line.part != USER_CODE]
    misdeeds = sum(strike.line.part == USER_CODE for strike in strikes)
    hardware = " and ".join(dict.fromkeys(f"{line.hardware}, Python {line.python}" for line in sessions))
    together = f" ({len(sessions)} sessions)" if len(sessions) > 1 else ""
    parts = [
        f"{len(strikes) - misdeeds} strikes and {misdeeds} misdeeds of user code in {len(runs)} runs{together}, "
        f"{', '.join(dict.fromkeys(line.date for line in sessions))}, on {hardware}:"
    ]
    parts += ["", *(f"- `{line.command}`" for line in sessions)]
    parts += ["", "Seconds until the next batch is in the ledger:", "", *progress(strikes)]
    parts += ["", "Undisturbed runs, and how soon those who come back take part again:", "", *speeds(strikes, speed_lines)]
    summary, parts = "\n".join(parts), []
    parts += ["### At random moments", "", *table(aimless, "part", lambda strike: strike.line.part, EVERYBODY)]
    by_moment = table(moments, "in the writing of", lambda strike: strike.line.moment.partition(" ")[2])
    parts += ["", "### Inside writes", "", INSIDE, "", *by_moment, "", "### What was found of the runs", "", *runs_table(runs)]
    return {"summary": summary, "details": "\n".join(parts)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Put the tables of chaos logs into docs/reliability.md.")
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--part", help="put all of it into this part of the page, which has sessions of its own")
    parser.add_argument("--print", action="store_true", help="to the terminal only")
    given = parser.parse_args()
    made = report([read(path) for path in given.logs])
    if given.part:
        made = {given.part: "\n\n".join(made.values()).replace("### ", "#### ")}
    if given.print:
        sys.stdout.write("\n\n".join(made.values()) + "\n")
        return 0
    text = PAGE.read_text(encoding="utf-8")
    for part, tables in made.items():
        begin, end = BEGIN.format(part=part), END.format(part=part)
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n\n{tables}\n\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
