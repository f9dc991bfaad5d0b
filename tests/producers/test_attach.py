"""A producer that attaches to a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.groups import Group
from streamrl.producers.protocol import Failure
from streamrl.producers.rollouts import Streak, attach, main
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.versions import Version
from tests.support.producing import Loop, in_memory, on_server, samples_in

EPISODE = Episode(segments=(Segment((1,)), Segment((2,), (-0.5,), (VersionSpan(1, Version(0, 0)),))), finish_reason="stop")


@pytest.mark.process
@on_server
async def test_another_producer_attaches_and_leaves(loop: Loop, functions: Path) -> None:
    guest = loop.worker(7)
    async with loop.engine():
        async with loop.serving(lambda worker: attach(worker, f"{functions}:calculator"), guest) as service:
            await loop.issue(3)
            first = samples_in(await loop.records(3))
        assert await service == 3
        assert {sample.producer for sample in first} == {"producer-7"}
        async with loop.serving(main, loop.worker()):
            await loop.issue(3)
            both = samples_in(await loop.records(6))
            await loop.queue_is_empty()
    assert sorted({(s.task, s.producer) for s in both}) == [(t, "producer-7" if t < 3 else "producer-0") for t in range(6)]


@pytest.mark.process
@in_memory
async def test_attach_refuses_what_is_no_producer(loop: Loop, functions: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        await attach(loop.worker(), f"{functions}:calculater")


def test_a_part_of_the_rollouts_that_is_too_great_is_hopeless_too() -> None:
    """Every task gives an episode, so that none has failed."""
    for limit, hopeless in ((0.5, True), (0.8, False)):
        streak = Streak(most=40, limit=limit)
        for _ in range(9):
            streak.tell(Group((EPISODE,), tuple(Failure(rollout, "timeout") for rollout in (1, 2, 3))))
            assert not streak.hopeless
        streak.tell(Group((EPISODE,), tuple(Failure(rollout, "failed", "no tool") for rollout in (1, 2, 3))))
        assert (streak.length, streak.newest, streak.hopeless) == (0, "no tool", hopeless)


def test_a_streak_is_of_tasks_that_the_producers_code_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    own, engine = Failure(0, "failed", "ValueError: no tool"), Failure(0, "failed", "engine: it is down")
    streak = Streak()
    for failures in ((own,), (engine,), (Failure(0, "filtered"),), ()):
        for _ in range(100):
            now_s += 1.0
            streak.tell(Group((), failures))
        assert streak.hopeless is (own in failures)
        streak = Streak()
    for _ in range(100):
        streak.tell(Group((), (own,)))
    assert not streak.hopeless, "a tool that is gone for a moment"
    now_s += 31.0
    streak.tell(Group((EPISODE,), (own,)))
    streak.tell(Group((), (own,)))
    assert not streak.hopeless, "it makes something"
