"""Built-in rewards that may hang, in the processes that producers score in."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from streamrl.data.characters import write_tokenizer
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.frames import Hello
from streamrl.producers.children.graders import Scoring
from streamrl.producers.children.jobs import NOTHING, job
from streamrl.producers.children.pool import Children
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.protocol import Failure
from streamrl.rewards.protocol import RewardValue
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RewardSpec, RolloutTask
from streamrl.schemas.versions import Version
from tests.rewards.episodes import task

pytestmark = pytest.mark.process


@asynccontextmanager
async def children(folder: Path, *, score_s: float = 60.0, **hello: Any) -> AsyncIterator[Children]:
    write_tokenizer(folder)
    told = Hello(model_dir=str(folder), max_len=64, chat_template=True, memory_bytes=2 << 30, **hello)
    made = Children(told, Limits(idle_s=60.0, total_s=60.0), count=1, scoring=Scoring(timeout_s=score_s))
    try:
        await made.start()
        yield made
    finally:
        await made.close()


async def scored(made: Children, one: RolloutTask, *completions: str) -> Any:
    sampled = Segment([1], [-1.0], (VersionSpan(1, Version(0, 0)),))
    episodes = [
        Episode(segments=(Segment([2]), sampled), finish_reason="stop", turns=(text,), rollout=k) for k, text in enumerate(completions)
    ]
    async with job(made, one, engine=cast(Any, None), keeping=NOTHING, max_deaths=1) as found:
        return await found.score(episodes)


async def test_a_comparison_that_never_ends_and_a_server_that_never_answers_have_the_limit_of_all_calls(tmp_path: Path) -> None:
    """The run's own reward is plain, and a plain call's clock begins in the main thread, which the row of the server never needs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asks = RewardSpec("remote", {"timeout_s": 300.0, "total_s": 300.0})
        shared = {"remote": {"url": f"http://127.0.0.1:{silent.getsockname()[1]}/"}}
        async with children(tmp_path, score_s=2.0, reward="math", reward_key="boxed", by_row=shared) as made, asyncio.timeout(300.0):
            [error] = await scored(made, task("1", reward=asks), "one")
            assert isinstance(error, TimeoutError) and "2 s of user code" in str(error)
            # A row's own label is not looked at for what may explode.
            given = await scored(made, task("x^{100}(1+x)^{999}"), r"\boxed{3}")
            assert isinstance(given, Failure) or isinstance(given[0], Exception)
            [value] = await scored(made, task("1"), r"\boxed{2}")
            assert value == RewardValue(1, {"answer": 0, "boxed": 1}), "by the part that is trained"
