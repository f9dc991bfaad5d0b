"""Run what is too long for CI, before a release, and write the results into docs/reliability.md.

    python -m scripts.soak                         every step, some hours
    python -m scripts.soak tests                   one step
    python -m scripts.soak chaos -- --minutes 30   one step, with more arguments for its first command

The steps are in `STEPS`. A step has failed when one of its commands has; the steps after it run all the same. The exit status is 1 when
a step has failed.
"""

from __future__ import annotations

import argparse
import glob
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- soak: begin (written by scripts/soak.py) -->", "<!-- soak: end -->"
HEAD = ("| step | result | minutes | date | commit | machine |", "|---|---|---|---|---|---|")

_XDIST = "-n 3 --dist loadfile --no-loadscope-reorder"
STEPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "tests": (("scripts.run_tests", "--tier", "soak", f"{_XDIST} --ignore=tests/sglang --ignore=tests/verifiers -o timeout=1800"),),
    "chaos": (("tests.chaos.session",), ("tests.chaos.report", "runs/chaos/*.jsonl")),
    "mutants": (("scripts.mutants", "--write"),),
}
"""Modules that each step runs, with their arguments; a pattern stands for the files that match it."""


class Outcome(NamedTuple):
    """The end of a step."""

    failed: bool
    said: str
    """The last line that it printed."""
    minutes: float


def run(commands: Sequence[Sequence[str]], more: Sequence[str]) -> Outcome:
    """Run the commands of a step, all of them; `more` are arguments for the first."""
    began_s, failed, last = time.monotonic(), False, ""
    for number, (module, *arguments) in enumerate(commands):
        expanded = [path for each in arguments for path in (sorted(glob.glob(each, root_dir=ROOT)) if "*" in each else [each])]
        words = [sys.executable, "-m", module, *expanded, *(more if number == 0 else ())]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
        failed = failed or process.returncode != 0
    return Outcome(failed, last, (time.monotonic() - began_s) / 60)


def row(step: str, outcome: Outcome) -> str:
    """Render a row of the table on the page."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    said = f"{'FAILED: ' if outcome.failed else ''}{outcome.said}".replace("|", "\\|")
    return f"| {step} | {said} | {outcome.minutes:.0f} | {time.strftime('%Y-%m-%d')} | {commit} | {machine} |"


def updated(page: str, rows: Mapping[str, str]) -> str:
    """Put rows into a page's table, each in the place of the one of its step.

    Raises:
        ValueError: the page has no such table.
    """
    before, found, rest = page.partition(BEGIN)
    table, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"expected {BEGIN} and {END} in the page")
    kept = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ") and line != HEAD[0]}
    lines = [line for step, line in (kept | dict(rows)).items() if step in STEPS]
    return "\n".join((before + BEGIN, "", *HEAD, *sorted(lines), "", END)) + after


def main() -> int:
    """Run the command; 1 when a step has failed."""
    arguments, separator, more = sys.argv[1:], "--", list[str]()
    if separator in arguments:
        cut = arguments.index(separator)
        arguments, more = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="soak", description="Run what is too long for CI, and write the results into docs/reliability.md."
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"some of {', '.join(STEPS)}; all without one")
    wanted: list[str] = parser.parse_args(arguments).steps or list(STEPS)
    if unknown := [step for step in wanted if step not in STEPS]:
        parser.error(f"expected steps of {', '.join(STEPS)}, got {', '.join(unknown)}")
    failed = False
    for step in wanted:
        outcome = run(STEPS[step], more)
        failed = failed or outcome.failed
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), {step: row(step, outcome)}), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
