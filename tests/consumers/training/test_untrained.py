"""A trainer tells of itself before it has trained anything: on the in-process bus, with a tabular policy."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.consumers.training.dead_letters import UntrainedCounts
from streamrl.consumers.training.worker import main
from streamrl.core.records import Share
from streamrl.core.state import initial_state
from streamrl.errors import WeightSyncError
from streamrl.runtime.worker import Worker
from streamrl.schemas.control import Untrained
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.harness import make_run
from tests.support.processes import until
from tests.support.records import Stream, config, view
from tests.support.world.world import table_config


def told(stream: Stream) -> dict[str, int]:
    return UntrainedCounts(2).told(stream.state, "").ended


@pytest.mark.parametrize(
    ("fill", "ended"),
    [
        (lambda stream: None, {}),
        (lambda stream: stream.group(0, (1.0, 1.0)), {"zero_variance": 2}),
        (lambda stream: stream.end(0), {"failed": 2}),
        (lambda stream: (stream.rollouts(0, view(0, reward=1.0)), stream.end(0, 1)), {"failed": 1, "zero_variance": 1}),
        (lambda stream: stream.end(0, reason="too easy"), {"other": 2}),
        (lambda stream: stream.poison(0), {"poison": 2}),
        (lambda stream: stream.poison(None), {"poison": 1}),
        (lambda stream: (stream.group(0), stream.group(0)), {}),
        (lambda stream: (stream.end(0), stream.reward(0, 1, 1.0)), {"failed": 2}),
    ],
)
def test_rollouts_are_counted_by_the_reason_that_ended_them(fill: Callable[[Stream], Any], ended: dict[str, int]) -> None:
    stream = Stream(config())
    fill(stream)
    assert told(stream) == ended


def test_groups_that_are_stale_or_cut_are_counted_before_any_batch() -> None:
    settings = config(overlong="drop")
    stream = Stream(settings, replace(initial_state(settings), version=Version(0, 5)))
    stream.group(0, oldest=0)
    cut = [
        replace(view(k, oldest=5, reward=float(k)), shares=(Share(inexact=False, truncated=True, num_tokens=3, oldest=5, newest=5),))
        for k in (0, 1)
    ]
    stream.rollouts(1, *cut)
    assert told(stream) == {"stale": 2, "truncated": 2}


def test_all_begins_anew_with_the_next_batch_and_is_counted_once() -> None:
    stream, counts = Stream(config()), UntrainedCounts(2)
    counts.dead(Version(), "no sample")
    counts.dead(Version(), "x" * 1000)
    for task in (0, 1):
        stream.end(task)
        assert counts.told(stream.state, "0.0") == Untrained(
            ended={"failed": 2 * task + 2}, dead=2, newest_dead="x" * 300, publishing="0.0"
        ), "a second look counts nothing twice"
    stream.group(2)
    stream.group(3)
    stream.train()
    assert counts.told(stream.state, "") == Untrained()
    counts.dead(stream.state.version, "again")
    assert counts.told(stream.state, "") == Untrained(dead=1, newest_dead="again")


def test_groups_that_wait_for_rewards_are_counted() -> None:
    stream = Stream(config())
    stream.rollouts(0, view(0), view(1))
    stream.rollouts(1, view(0, reward=1.0))
    assert UntrainedCounts(2).told(stream.state, "") == Untrained(unrewarded=1)


@asynccontextmanager
async def trainer(tmp_path: Path) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    run, found = make_run(tmp_path, table_config(tmp_path, weights={"transport": "shm"}))
    worker = Worker(config=found, run_dir=run, bus=MemoryBus(found.run.name), kind="trainer", index=0)
    task = asyncio.create_task(main(worker))
    try:
        yield worker, task
    finally:
        worker.draining.set()
        await asyncio.wait([task], timeout=60)


async def test_what_ends_the_publisher_ends_the_trainer_that_waits_for_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 kB of shared memory an engine says nothing, and no sample ever comes."""

    def full(descriptor: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("streamrl.weights.shm.reserve", full)
    async with trainer(tmp_path) as (_, task):
        await asyncio.wait([task], timeout=60)
        assert task.done(), "it waits for samples, which cannot come"
        with raises(WeightSyncError):
            task.result()


async def test_a_waiting_trainer_tells_of_messages_that_cannot_be_used(tmp_path: Path) -> None:
    async with trainer(tmp_path) as (worker, task):
        await worker.bus.publish(Subjects(worker.config.run.name).samples("main"), b"no Arrow")
        await until(lambda: task.done() or msgspec.convert(worker.detail(), Untrained).dead == 1)
        assert msgspec.convert(worker.detail(), Untrained).newest_dead
        await until(lambda: task.done() or worker.state.startswith("waits for samples"))
        assert not task.done()
