"""A long session of faults: `python -m tests.chaos.session --minutes 10`. One run after another, each struck again and again, then judged.

Logs go to `runs/chaos/<date>.jsonl`: a line for the session (hardware, command), a line a fault, a line a run with what the audit, the
replay and, in lockstep, the comparison with an undisturbed run have found. `python -m tests.chaos.report` makes the table of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import random
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.chaos.log import FaultLine, Line, RunLine, SessionLine
from tests.faults.disturbed import Disturbed, disturbed
from tests.faults.faults import KINDS, Fault, endless
from tests.faults.shapes import LOCKSTEP, QUICKSTART, STREAM, Shape
from tests.faults.verdict import judge

SHAPES = {shape.name: shape for shape in (STREAM, LOCKSTEP, QUICKSTART)}
STEPS_PER_FAULT = {"stream": 10, "lockstep": 10, "quickstart": 10}
"""More than are trained before the last strike: the run must not end before it."""


class Session:
    """One session. `log` is appended to as things happen."""

    def __init__(self, given: argparse.Namespace, log: Path) -> None:
        self._given = given
        self._log = log
        self._rng = random.Random(given.seed)
        self._faults: dict[str, Iterator[Fault]] = {}
        self._calm: dict[str, str] = {}
        self._ends_s = time.monotonic() + 60 * given.minutes

    def write(self, line: Line) -> None:
        """Append a line, and say it."""
        text = msgspec.json.encode(line).decode()
        with self._log.open("a") as file:
            file.write(text + "\n")
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    async def run(self) -> int:
        """Strike until the time is over; returns the number of runs with a problem."""
        bad = 0
        shapes = [SHAPES[name] for name in self._given.shapes.split(",")]
        for number, shape in enumerate(itertools.cycle(shapes)):
            if time.monotonic() >= self._ends_s:
                return bad
            problems = await self._disturb(shape, number)
            bad += bool(problems)
        return bad

    def _steps(self, shape: Shape) -> int:
        return STEPS_PER_FAULT[shape.name] * self._given.faults

    async def _disturb(self, shape: Shape, number: int) -> list[str]:
        if shape.deterministic and not self._calm:
            self._calm = await self._undisturbed(shape)
        place = self._log.with_suffix("") / f"{number}-{shape.name}"
        shutil.rmtree(place, ignore_errors=True)
        given = self._given
        drawn = endless(self._rng, bus_weights=shape is not QUICKSTART)
        faults = self._faults.setdefault(shape.name, (fault for fault in drawn if fault.kind in given.kinds))
        counts, problems = {}, []
        began_s = time.monotonic()
        try:
            async with disturbed(place, shape, steps=self._steps(shape), stop_s=given.stop_s, away_s=given.away_s) as run:
                for fault in itertools.islice(faults, given.faults):
                    if time.monotonic() >= self._ends_s:
                        break
                    problems += await self._strike(run, fault, number, shape)
                await run.finish()
                verdict = await judge(run.run)
            counts = verdict.counts
            problems += verdict.problems
            if shape.deterministic and verdict.digests != self._calm:
                problems.append("the digests are not those of the undisturbed run")
        except Exception as error:  # whatever it is, it is what is to be said of this run
            problems.append(f"{type(error).__name__}: {error}"[:1500])
        self.write(RunLine(number, shape.name, problems, counts, round(time.monotonic() - began_s, 1)))
        if not problems:
            shutil.rmtree(place)
        return problems

    async def _strike(self, run: Disturbed, fault: Fault, number: int, shape: Shape) -> list[str]:
        struck = await run.strike(fault, self._rng)
        moment = fault.moment if struck.hit else f"random (missed: {fault.moment})"
        held_s = {"kill -9": 0.0, "SIGSTOP": self._given.stop_s}.get(fault.kind, self._given.away_s)
        recovered = struck.recovery_s >= 0
        self.write(
            FaultLine(
                number,
                shape.name,
                fault.part,
                fault.kind,
                moment,
                struck.version,
                held_s,
                round(struck.recovery_s, 2),
                "recovered" if recovered else "no batch came",
            )
        )
        return [] if recovered else [f"no batch came after {fault.kind} of {fault.part}, {moment}"]

    async def _undisturbed(self, shape: Shape) -> dict[str, str]:
        place = self._log.with_suffix("") / f"calm-{shape.name}"
        shutil.rmtree(place, ignore_errors=True)
        async with disturbed(place, shape, steps=self._steps(shape), stop_s=0.0, away_s=0.0, attach=False) as run:
            await run.finish()
            digests = (await judge(run.run)).digests
        shutil.rmtree(place)
        return digests


def processor() -> str:
    """Model of the processor, as Linux has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> int:
    """Run a session; 1 when a run had a problem."""
    parser = argparse.ArgumentParser(description="Kill, stop and cut off the parts of real runs for a while.")
    parser.add_argument("--minutes", type=float, default=30.0, help="no strike after this; the last run still ends and is judged")
    parser.add_argument("--faults", type=int, default=25, help="strikes in one run")
    parser.add_argument("--stop-s", type=float, default=30.0, help="how long SIGSTOP lasts")
    parser.add_argument("--away-s", type=float, default=5.0, help="how long a cut connection cannot come back")
    parser.add_argument("--shapes", default="stream,lockstep,quickstart", help="kinds of run, in turn")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="faults to draw from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    session = Session(given, given.out / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    command = shlex.join(["python", "-m", "tests.chaos.session", *sys.argv[1:]])
    hardware = f"{len(os.sched_getaffinity(0))} cores of {processor()}, nice {os.nice(0)}"
    session.write(SessionLine(hardware, command, time.strftime("%Y-%m-%d"), platform.python_version()))
    return 1 if asyncio.run(session.run()) else 0


if __name__ == "__main__":
    sys.exit(main())
