"""Calls that the parent ends in any moment of their life: each ends in its process too, and its process serves the next one."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.producers.children.frames import Hello
from streamrl.producers.children.graders import Graders, Scoring
from streamrl.producers.episode import Episode, Segment
from streamrl.rewards.protocol import RewardValue
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.versions import Version
from tests.support.processes import until
from tests.support.user_code import CODE, Workshop

pytestmark = pytest.mark.process

HANGS = """
def plain(task, episode):
    time.sleep(3600 if task.index else 0)
    return 1.0


async def asks(task, episode):
    await asyncio.sleep(3600 if task.index else 0)
    return 1.0


def cleans(task, episode):
    tell("began")
    try:
        time.sleep(3600)
    finally:
        time.sleep(0.5)
        tell("cleaned")
"""
TURN = Segment((2,), (-0.5,), (VersionSpan(1, Version(0, 0)),))
EPISODES = (Episode(segments=(Segment((1,)), TURN), finish_reason="stop"),)


async def graders(workshop: Workshop, name: str) -> Graders:
    """One process, started."""
    path = workshop.folder / "code.py"
    path.write_text(CODE + HANGS)
    hello = Hello(reward=f"{path}:{name}", model_dir="", max_len=32, chat_template=True, memory_bytes=0)
    made = Graders(hello, Scoring(timeout_s=600.0, children=1, answer_s=600.0))
    await made.start()
    return made


@pytest.mark.parametrize("name", ["plain", "asks"])
async def test_a_call_that_is_cancelled_in_any_moment_ends_in_its_process(workshop: Workshop, name: str) -> None:
    """Before its process has heard of it, before its function has begun, or later: 40 moments of the first two milliseconds."""
    pool = await graders(workshop, name)
    (child,) = pool.processes
    try:
        for moment in range(120):
            call = asyncio.create_task(pool.score(workshop.task(1 + moment, 1), EPISODES))
            while not child.num_jobs:
                await asyncio.sleep(0)
            await asyncio.sleep(moment % 40 * 5e-5)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: not child.num_leaving)
        assert await pool.score(workshop.task(0, 1), EPISODES) == [RewardValue(1.0)]
        assert pool.pids == [child.pid] and not child.lost
    finally:
        await pool.close()


async def test_what_a_cancelled_function_cleans_up_is_not_cut_off(workshop: Workshop) -> None:
    pool = await graders(workshop, "cleans")
    try:
        call = asyncio.create_task(pool.score(workshop.task(0, 1), EPISODES))
        await until(lambda: bool(workshop.told("began")))
        call.cancel()
        await until(lambda: bool(workshop.told("cleaned")))
    finally:
        await pool.close()
