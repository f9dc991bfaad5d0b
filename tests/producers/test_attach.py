"""A producer that attaches to a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.producers.rollouts import attach, main
from tests.producers.conftest import Loop, samples_in


@pytest.mark.process
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
async def test_attach_refuses_what_is_no_producer(loop: Loop, functions: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        await attach(loop.worker(), f"{functions}:calculater")
