"""Run the tests: green only if every one of them ran and passed. `make test` is this, and so is CI, with two options more.

    python -m scripts.run_tests --tier test [--retry] [--together] [--may-skip PREFIX] [--also-failed NAME] "PYTEST ARGUMENTS" ...

Each argument is one run of pytest. They run in this order, or at the same time with `--together`: then the output of the later ones is
shown when all have ended. A test without a result, because its process died, has failed. The tier chooses tests by their markers and the
limits that `scripts.costs` holds them to.

With `--retry`, tests that failed or have no result run once more, one after the other, when all runs are through. Each of them is named
and counted in the last lines. Some problems are final: nothing is collected, a file cannot be collected, the first run leaves no report,
or it ends with a status that is not about tests. With `--may-skip`, a test that is skipped for another reason than one with this prefix
has failed. The last line reads "3 passed, 1 failed", and says what was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from scripts.costs import COUNTING, SHARED, VARIABLE, Costs, keep, read_limits

ABOUT_TESTS = (0, 1)
"""Exit statuses of pytest that say: all tests ran, and passed or not."""
SLOWEST = 30
"""The number of slowest tests that are listed with their times."""
TIERS = {"fast": ("process", "whole", "slow", "soak"), "test": ("slow", "soak"), "ci": ("soak",), "soak": ()}
"""The markers that each tier leaves out."""
WHERE = {"process": "make test", "whole": "make test", "slow": ".ci/run", "soak": "make soak"}
"""The command that runs the tests with a marker."""


@dataclass
class Report:
    """What one run of pytest has written."""

    collected: list[str] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)
    """What each test took, with its fixtures."""
    core_s: Counter[str] = field(default_factory=Counter)
    """Its processor time."""
    broken: dict[str, str] = field(default_factory=dict)
    exit: int | None = None
    """None: the process died before it came to its end."""

    @property
    def wanting(self) -> dict[str, str]:
        """Tests that have not passed, and what became of them."""
        done = self.passed | self.skipped.keys()
        return {one: "failed" if one in self.failed else "no result" for one in self.collected if one not in done}


def read(path: Path) -> Report:
    """The report in a file; a last line that is cut off counts as not written.

    Raises:
        ValueError: another line is not what `scripts.outcomes` writes.
    """
    report = Report()
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        entry = json.loads(line)
        if "collected" in entry:
            report.collected += entry["collected"]
        elif "broken" in entry:
            report.broken[entry["broken"]] = entry["error"]
        elif "exit" in entry:
            report.exit = entry["exit"]
        else:
            _add(report, **entry)
    return report


def _add(report: Report, *, test: str, when: str, outcome: str, reason: str, seconds: float = 0.0, core_s: float = 0.0) -> None:
    """Add one phase: a test has passed when it is torn down and no phase has failed."""
    report.core_s[test] += core_s  # pyright: ignore[reportArgumentType]
    report.seconds[test] += seconds  # pyright: ignore[reportArgumentType]
    if outcome == "failed":
        report.failed.add(test)
        report.passed.discard(test)
        report.skipped.pop(test, None)
    elif outcome == "skipped":
        report.skipped[test] = reason
    elif when == "teardown" and test not in report.failed and test not in report.skipped:
        report.passed.add(test)


def counted(starts: Path) -> dict[str, str]:
    """An environment in which every Python process writes down what it starts."""
    paths = os.pathsep.join(filter(None, (str(COUNTING), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, VARIABLE: str(starts)}


def pytest_run(arguments: Sequence[str], path: Path, starts: Path, out: Path | None = None) -> Report:
    """Run pytest; its report, empty where it has left none.

    Args:
        arguments: of it.
        path: of the report.
        starts: of what its tests start.
        out: where it prints; None: here.

    Raises:
        ValueError: the report is none.
    """
    command = [sys.executable, "-m", "pytest", "-p", "scripts.outcomes", f"--outcomes={path}", *arguments]
    say("runs " + shlex.join(command))
    with out.open("wb") if out is not None else nullcontext() as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file and subprocess.STDOUT}
        status = subprocess.run(command, env=counted(starts), check=False, **streams).returncode
    report = read(path) if path.exists() else Report()
    if report.exit is None:
        print()  # its own line was not ended
        say(f"pytest did not come to its end: status {status}")
    else:
        report.exit = status  # it may die after its last line
    return report


@dataclass
class Verdict:
    """What is said at the end."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)
    passed_then: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    costs: Costs = field(default_factory=Costs)
    left_out: str = ""
    """What the last line says of tests that were not to run."""

    def first(self, arguments: str, report: Report, may_skip: Sequence[str]) -> bool:
        """Add a first run; whether its wanting tests may run once more."""
        problems = [f"cannot be collected: {one or arguments}\n{error}" for one, error in report.broken.items()]
        if not report.collected and not report.broken:
            problems.append(f"no usable report or no tests: pytest {arguments}")
        if report.exit is not None and not problems:
            if report.exit not in ABOUT_TESTS or (report.exit == 1) != bool(report.failed):
                problems.append(f"pytest {arguments} ended with status {report.exit}, which no failed test explains")
            elif report.wanting.keys() - report.failed:
                # Nobody has died: an option such as -x has stopped it, or too many workers were lost.
                problems.append(f"pytest {arguments} ended without running all tests")
        if not problems and not report.passed and not report.wanting:
            problems.append(f"no test of pytest {arguments} passed")
        self.failures += problems
        self.passed += len(report.passed)
        self.seconds.update(report.seconds)
        for test, core_s in report.core_s.items():
            self.costs.spend(test, core_s)
        self.skips(report, may_skip)
        return not problems

    def again(self, before: Report, after: Report, may_skip: Sequence[str]) -> None:
        """Add the second run of what the first was wanting."""
        for test, cause in before.wanting.items():
            passed = test in after.passed
            then = "passed" if passed else "failed" if test in after.failed else "skipped" if test in after.skipped else "no result"
            self.retried.append(f"{test}: first {cause}, then {then}")
            self.passed_then += passed
            if then in ("failed", "no result"):
                self.failures.append(f"{then}: {test}")
        self.passed += len(after.passed)
        self.skips(after, may_skip)
        if after.exit != 0 and not after.wanting:
            self.failures.append(f"the second run ended with status {after.exit}, which no test explains")

    def skips(self, report: Report, may_skip: Sequence[str]) -> None:
        """Count the skipped that may be, and fail for the others."""
        for test, why in report.skipped.items():
            if why.startswith(tuple(may_skip)):
                self.skipped[why] += 1
            else:
                self.failures.append(f"skipped: {test}: {why}")

    def tell(self) -> None:
        """Print it; the counts come last, in a line of their own."""
        for test, seconds in self.seconds.most_common(SLOWEST):
            say(f"slowest: {seconds:.1f} s {test}")
        for why, count in self.skipped.items():
            say(f"skipped {count}, as it may be: {why}")
        if self.retried:
            say(f"{len(self.retried)} tests ran once more, alone; {self.passed_then} of them passed then:")
        for line in self.retried:
            say(f"retried: {line}")
        for line in self.failures:
            say(f"FAILED {line}")
        print(f"{self.passed} passed, {len(self.failures)} failed{self.left_out}", flush=True)


def say(line: str) -> None:
    """A line of the script's own, between those of pytest."""
    print(f"tests: {line}", flush=True)


def first_runs(runs: Sequence[str], scratch: Path, *, together: bool) -> list[Report | ValueError]:
    """Run each once; its report, or why that cannot be read."""

    def first(number: int) -> Report | ValueError:
        try:
            out = scratch / f"out-{number}" if together and number else None
            return pytest_run(shlex.split(runs[number]), scratch / f"first-{number}.jsonl", scratch / "starts", out)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(len(runs) if together else 1) as pool:
        reports = list(pool.map(first, range(len(runs))))
    for number, arguments in enumerate(runs):
        if (out := scratch / f"out-{number}").exists():
            say(f"what pytest {arguments} printed:")
            print(out.read_text(encoding="utf-8", errors="replace"), flush=True)
    return reports


def judged(runs: Sequence[str], scratch: Path, *, retry: bool, together: bool, may_skip: Sequence[str]) -> Verdict:
    """Run all, then once more what is wanting where that is asked for."""
    verdict = Verdict()
    wanting: list[tuple[int, str, Report]] = []
    for number, (arguments, report) in enumerate(zip(runs, first_runs(runs, scratch, together=together), strict=True)):
        if isinstance(report, ValueError):
            verdict.failures.append(f"the report of pytest {arguments} cannot be read: {report}")
            continue
        if verdict.first(arguments, report, may_skip) and retry:
            wanting += [(number, arguments, report)] if report.wanting else []
        else:
            verdict.failures += [f"{cause}: {test}" for test, cause in report.wanting.items()]
    for number, arguments, report in wanting:
        only = scratch / f"only-{number}.json"
        only.write_text(json.dumps(list(report.wanting)), encoding="utf-8")
        alone = [*shlex.split(arguments), *(["-n", "0"] if " -n" in f" {arguments}" else []), f"--only={only}"]
        try:
            after = pytest_run(alone, scratch / f"second-{number}.jsonl", scratch / "starts-again")
        except ValueError as error:
            verdict.failures.append(f"the report of the second run of pytest {arguments} cannot be read: {error}")
            after = Report()
        verdict.again(report, after, may_skip)
    return verdict


def main() -> int:
    """The command; 0 only when every test ran and passed."""
    parser = argparse.ArgumentParser(prog="run_tests", description="Run the tests: green only if every one of them ran and passed.")
    parser.add_argument("runs", nargs="+", metavar="PYTEST ARGUMENTS", help="arguments of one run of pytest, as one word")
    parser.add_argument("--retry", action="store_true", help="run once more, alone, what has not passed")
    parser.add_argument("--together", action="store_true", help="run all of them at the same time")
    parser.add_argument("--tier", choices=TIERS, default="soak", help="which tests run, by their markers; all without it")
    parser.add_argument("--may-skip", action="append", metavar="PREFIX", help="begin of a reason to skip that is no failure")
    parser.add_argument("--also-failed", action="append", default=[], metavar="NAME", help="a step of before that counts as a failed test")
    options = parser.parse_args()
    without = TIERS[options.tier]
    wanted = shlex.quote(" and ".join(f"not {marker}" for marker in without))
    runs = [f"{run} -m {wanted}" if without else run for run in options.runs]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="streamrl-tests-") as scratch:
        verdict = judged(runs, Path(scratch), retry=options.retry, together=options.together, may_skip=options.may_skip or [""])
        if (starts := Path(scratch, "starts")).exists():
            verdict.costs.read_starts(starts.read_text(encoding="utf-8").splitlines())
    if verdict.costs.core_s.keys() - {SHARED}:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(verdict.costs.table(used.ru_utime + used.ru_stime), flush=True)
        keep(options.tier, verdict.costs)
        verdict.failures += verdict.costs.over(read_limits(options.tier))
    verdict.failures += options.also_failed
    verdict.left_out = "".join(f"; tests marked {one} were left out: {WHERE[one]} runs them" for one in without)
    say(f"took {(time.monotonic() - began_s) / 60:.1f} minutes")
    verdict.tell()
    return 1 if verdict.failures else 0


if __name__ == "__main__":
    sys.exit(main())
