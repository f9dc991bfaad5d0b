"""OpenEnv's real server, in its own environment, stepped by the turns of a scripted policy."""

import asyncio
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bridges.openenv import check
from streamrl.config.tree import ProducerConfig
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import ConfigError
from streamrl.producers.episode import Episode
from streamrl.producers.functions import make_producer
from streamrl.producers.protocol import Failure
from tests.support.errors import raises
from tests.support.needs import need, openenv_python
from tests.support.policies import make_model, script, start_engine
from tests.support.rolling import context_of, task_of

SERVER = Path(__file__).with_name("openenv_server.py")
SEATS = 2

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


def serve(python: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server that answers, and its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen([python, str(SERVER), str(port), str(SEATS)], cwd="/")
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/schema", timeout=5):
            return process, url
        time.sleep(0.2)
    process.kill()
    raise AssertionError("the server does not answer")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    need("openenv")
    process, url = serve(openenv_python() or "")
    yield url
    process.kill()
    process.wait()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_model(tmp_path / "model")


@pytest.fixture
async def engine(tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[TableEngine]:
    engine = await start_engine(tmp_path / "model", script(tokenizer, {(0, "<|assistant|>"): "?", (1, "?"): "!"}))
    yield engine
    await engine.stop()


async def roll_out(
    engine: TableEngine, tokenizer: Tokenizer, url: str, *, mode: str = "", num_rollouts: int = 1, **options: Any
) -> Sequence[Episode | Failure]:
    ids = tuple(tokenizer.encode("<|user|>add<|end|><|assistant|>"))
    task = task_of(tokenizer, label=None, metadata={"reset": {"mode": mode}}, num_rollouts=num_rollouts)
    task = replace(task, prompt="add", prompt_ids=ids)
    return await make_producer(f"openenv:{url}").rollout(task, context_of(engine, tokenizer, task, options=options))


async def test_a_server_is_stepped_by_the_models_turns(engine: TableEngine, tokenizer: Tokenizer, server: str) -> None:
    [episode] = await roll_out(engine, tokenizer, server, observation="text")
    assert isinstance(episode, Episode)
    assert tokenizer.decode([token for segment in episode.segments for token in segment.token_ids]) == (
        "<|user|>add\n\n3+4<|end|><|assistant|>?!<|end|><|user|>not ?!<|end|><|assistant|>?!<|end|>"
    )
    assert (episode.reward, episode.metadata) == (1.25, {"openenv": {"steps": 2, "done": True}})


async def test_rollouts_wait_for_a_seat_and_turns_are_bounded(engine: TableEngine, tokenizer: Tokenizer, server: str) -> None:
    episodes = await roll_out(engine, tokenizer, server, num_rollouts=3 * SEATS, max_turns=1)
    assert [episode.reward for episode in episodes if isinstance(episode, Episode)] == [0.25] * (3 * SEATS)


@pytest.mark.parametrize(("mode", "said"), [("silent", "ended without any reward"), ("crashes", "EXECUTION_ERROR")])
async def test_an_environment_without_a_reward_or_that_crashes_gives_none(
    engine: TableEngine, tokenizer: Tokenizer, server: str, mode: str, said: str
) -> None:
    [failure] = await roll_out(engine, tokenizer, server, mode=mode)
    assert isinstance(failure, Failure) and failure.reason == "failed" and said in failure.detail


async def test_an_environment_that_gives_no_answer_is_waited_for(engine: TableEngine, tokenizer: Tokenizer, server: str) -> None:
    """A child is over its limit then, and cancels it."""
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(roll_out(engine, tokenizer, server, mode="hangs"), 3)


async def test_an_action_that_is_none_is_answered_to_the_model(engine: TableEngine, tokenizer: Tokenizer, server: str) -> None:
    [item] = await roll_out(engine, tokenizer, server, max_turns=2, action="no_such_field")
    assert isinstance(item, Episode), item
    assert "<|user|>error: " in tokenizer.decode([token for segment in item.segments for token in segment.token_ids])


async def test_a_server_that_dies_fails_the_rollout(engine: TableEngine, tokenizer: Tokenizer, server: str) -> None:
    process, url = await asyncio.to_thread(serve, openenv_python() or "")
    try:
        [failure] = await roll_out(engine, tokenizer, url, mode="dies")
        assert isinstance(failure, Failure) and failure.reason == "failed" and "session during step" in failure.detail
        [failure] = await roll_out(engine, tokenizer, url)
        assert isinstance(failure, Failure) and "Connect" in failure.detail
    finally:
        process.kill()
        process.wait()


def test_what_cannot_run_is_refused_before_the_start(server: str) -> None:
    check(server, ProducerConfig(options={"max_turns": 2, "observation": "text"}))
    for url, options, key in (
        ("localhost:8000", {}, "producer.function"),
        ("http://127.0.0.1:1", {}, "producer.function"),
        (server, {"max_turn": 2}, "producer.options"),
    ):
        with raises(ConfigError, key=key):
            check(url, ProducerConfig(options=options))
