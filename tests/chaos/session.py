"""A long session of faults: `python -m tests.chaos.session --minutes 10`. One run after another, each struck again and again, then judged.

Logs go to `runs/chaos/<date>.jsonl`: a line for the session (hardware, command), a line a fault, a line a run with what the audit, the
replay and, in lockstep, the comparison with an undisturbed run have found. `python -m tests.chaos.report` makes the tables of them.
"""

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

from tests.chaos.log import FaultLine, Line, RunLine, SessionLine, SpeedLine
from tests.support.world.disturbed import ON_ITS_WAY_S, Disturbed, disturbed, speed
from tests.support.world.faults import AGENT, GATEWAY, GRADER, KINDS, PARTS, RANK_1, WHOLE, Fault, endless
from tests.support.world.misdeeds import told
from tests.support.world.shapes import AGENTS, DAMAGED, DEFAULTS, LOCKSTEP, MISDEEDS, QUICKSTART, RANKS, STREAM, Shape
from tests.support.world.verdict import judge, undisturbed

SHAPES = {shape.name: shape for shape in (STREAM, LOCKSTEP, AGENTS, DAMAGED, QUICKSTART, RANKS, MISDEEDS, DEFAULTS)}
EVERYBODY = (*PARTS, GRADER, RANK_1, GATEWAY, AGENT, WHOLE)
STEPS_PER_FAULT = 10
"""More than are trained before the last strike: the run must not end before it."""
LAST_STEPS = 30
"""Where no gate holds the tasks, no strike falls in the last of the steps."""


class Session:
    def __init__(self, given: argparse.Namespace, log: Path) -> None:
        self._given = given
        self._log = log
        self._rng = random.Random(given.seed)
        self._faults: dict[str, Iterator[Fault]] = {}
        self._calm: dict[str, str] = {}
        self._ends_s = 0.0

    def write(self, line: Line) -> None:
        text = msgspec.json.encode(line).decode()
        with self._log.open("a") as file:
            file.write(text + "\n")
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    async def run(self) -> int:
        """Strike until the time is over; returns the number of runs with a problem."""
        bad = 0
        shapes = [SHAPES[name] for name in self._given.shapes.split(",")]
        for shape in SHAPES.values():
            if self._given.speed_steps and shape in shapes and not shape.misdeed_every and not shape.losses:
                try:
                    await self._speed(shape)
                except Exception as error:  # the strikes are worth having all the same
                    bad += 1
                    self.write(RunLine(-1, shape.name, [f"{type(error).__name__}: {error}"[:1500]], {}, 0.0))
        self._ends_s = time.monotonic() + 60 * self._given.minutes
        for number, shape in enumerate(itertools.cycle(shapes)):
            if time.monotonic() >= self._ends_s:
                return bad
            problems = await self._disturb(shape, number)
            bad += bool(problems)
        return bad

    def _steps(self, shape: Shape) -> int:
        return STEPS_PER_FAULT * self._given.faults

    async def _speed(self, shape: Shape) -> None:
        place = self._log.with_suffix("") / f"speed-{shape.name}"
        shutil.rmtree(place, ignore_errors=True)
        steps = self._given.speed_steps
        async with disturbed(place, shape, steps=steps, stop_s=0.0, away_s=0.0, attach=False) as run:
            samples, wall_s, processor_s = await speed(run, steps - 1)
            await run.finish()
        self.write(SpeedLine(shape.name, samples, round(wall_s, 3), round(processor_s, 3)))
        shutil.rmtree(place)

    async def _disturb(self, shape: Shape, number: int) -> list[str]:
        if shape.deterministic and not self._calm:
            calm = self._log.with_suffix("") / f"calm-{shape.name}"
            self._calm = await undisturbed(calm, shape, self._steps(shape))
            shutil.rmtree(calm)
        place = self._log.with_suffix("") / f"{number}-{shape.name}"
        shutil.rmtree(place, ignore_errors=True)
        given = self._given
        drawn = endless(self._rng, shape)
        faults = self._faults.setdefault(shape.name, (each for each in drawn if each.kind in given.kinds and each.part in given.parts))
        counts, problems = {}, []
        began_s = time.monotonic()
        try:
            async with disturbed(place, shape, steps=self._steps(shape), stop_s=given.stop_s, away_s=given.away_s) as run:
                for fault in itertools.islice(faults, given.faults):
                    late = shape.misdeed_every and run.versions > self._steps(shape) - LAST_STEPS
                    if time.monotonic() >= self._ends_s or late:
                        break
                    problems += await self._strike(run, fault, number, shape)
                await run.finish()
                self._write_misdeeds(run, place, number, shape)
                verdict = await judge(run.run, shape, run.made, None if run.crew is None else run.crew.told())
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

    def _write_misdeeds(self, run: Disturbed, place: Path, number: int, shape: Shape) -> None:
        for one in told(place):
            later = [stored_s for stored_s in run.entries if stored_s > one.time_s + ON_ITS_WAY_S]
            if later:  # else it was the run's end
                recovery_s = round(min(later) - one.time_s, 2)
                self.write(FaultLine(number, shape.name, "user code", one.what, "random", 0, 0.0, recovery_s, "recovered"))

    async def _strike(self, run: Disturbed, fault: Fault, number: int, shape: Shape) -> list[str]:
        struck = await run.strike(fault, self._rng)
        moment = fault.moment if struck.hit else f"random (missed: {fault.moment})"
        if fault.damage and not struck.note:
            moment = f"random (nothing to damage: {fault.damage})"
        away_s = self._given.away_s
        held_s = {"SIGSTOP": fault.held_s or self._given.stop_s, "cut": away_s, "HTTP cut": away_s}.get(fault.kind, 0.0)
        recovered = struck.recovery_s >= 0
        verdict = ("recovered" if recovered else "no batch came") + (f"; {struck.note}" if struck.note else "")
        recovery_s, attach_s, engine_s = (round(each, 2) for each in (struck.recovery_s, struck.attach_s, struck.engine_s))
        what = (number, shape.name, fault.part, fault.kind, moment, struck.version)
        self.write(FaultLine(*what, held_s, recovery_s, verdict, attach_s, engine_s))
        return [] if recovered else [f"no batch came after {fault.kind} of {fault.part}, {moment}"]


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill, stop and cut off the parts of real runs for a while.")
    parser.add_argument("--minutes", type=float, default=30.0, help="no strike after this; the last run still ends and is judged")
    parser.add_argument("--faults", type=int, default=25, help="strikes in one run; it trains ten times as many steps")
    parser.add_argument("--speed-steps", type=int, default=0, help="steps of an undisturbed run whose speed is measured first; 0: none")
    parser.add_argument("--stop-s", type=float, default=30.0, help="how long SIGSTOP lasts")
    parser.add_argument("--away-s", type=float, default=5.0, help="how long a cut connection cannot come back")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="kinds of run, in turn")
    parser.add_argument("--parts", nargs="+", choices=EVERYBODY, default=EVERYBODY, help="who is struck")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="faults to draw from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="folder for the log, and for runs that were not judged right")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    session = Session(given, given.out / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    words = sys.argv[1:]
    if "--out" in words:  # where it is put is nobody's concern
        del words[words.index("--out") : words.index("--out") + 2]
    command = shlex.join(["python", "-m", "tests.chaos.session", *words])
    hardware = f"{len(os.sched_getaffinity(0))} cores of {processor()}, nice {os.nice(0)}"
    session.write(SessionLine(hardware, command, time.strftime("%Y-%m-%d"), platform.python_version()))
    return 1 if asyncio.run(session.run()) else 0


if __name__ == "__main__":
    sys.exit(main())
