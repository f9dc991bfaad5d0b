"""A key that holds something else than it should is named; nobody fails on it without saying which."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from streamrl.bus.memory.bus import MemoryBus
from streamrl.config.tree import Config, RunConfig
from streamrl.consumers.training.checkpoints import latest_key, read_latest
from streamrl.consumers.training.ledger import take_fence
from streamrl.consumers.training.loop import raise_grant
from streamrl.data.problems import Problem, Problems
from streamrl.errors import SchemaError
from streamrl.producers.attempts import Attempts
from streamrl.producers.checkpoints import RolloutCheckpoints
from streamrl.producers.feeder import Feeder
from streamrl.schemas.control import Grant
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.weights.pins import Pin, Pins

ANSWER = b'{"type":"io.nats.jetstream.api.v1.stream_info_response","error":{"code":404}}'
PROBLEMS = Problems(problems=(Problem(row=0, line=1, prompt_ids=(0,), prompt="p", label="l"),), digest="digest")


@pytest.fixture
def memory_bus(run_id: str) -> MemoryBus:
    return MemoryBus(run_id)


@pytest.mark.parametrize("value", [ANSWER, b"-1", b"1.5", b"\xff\x00", "٣".encode()])
async def test_a_fence_that_is_no_number_is_named(memory_bus: MemoryBus, value: bytes) -> None:
    await memory_bus.kv.put("fences/main", value)
    with pytest.raises(SchemaError, match="key fences/main") as caught:
        await take_fence(memory_bus, "main")
    assert "nats kv put" in caught.value.hint
    await memory_bus.kv.put("fences/main", b"41")
    assert await take_fence(memory_bus, "main") == 42


async def test_a_grant_and_a_pointer_that_are_none_are_named(memory_bus: MemoryBus, run_id: str) -> None:
    for key in ("granted", latest_key("main")):
        await memory_bus.kv.put(key, ANSWER)
    feeder = Feeder(memory_bus, Subjects(run_id), Config(run=RunConfig(name=run_id)), PROBLEMS)
    async with asyncio.timeout(20):
        with pytest.raises(ExceptionGroup) as group:
            await feeder.run()
    assert [type(error) for error in group.value.exceptions] == [SchemaError] and "key granted" in str(group.value.exceptions[0])
    with pytest.raises(SchemaError, match="key granted"):
        await raise_grant(memory_bus, Grant(granted=3, version=0, retired=0))
    with pytest.raises(SchemaError, match="key latest/main"):
        await read_latest(memory_bus, "main")


@pytest.mark.parametrize("key", ["no-version/a", "1/a", "1-2-3/a", "1-2", "1-2/a/b", f"1-{'9' * 5000}/a", "-1/a"])
async def test_a_pin_that_is_none_is_passed_over(memory_bus: MemoryBus, key: str) -> None:
    pins = Pins(memory_bus.kv, "policy")
    await memory_bus.kv.put(f"pins/policy/{key}", b"")
    await pins.hold(Version(0, 3), "evaluator-0")
    assert await pins.versions() == {Version(0, 3)}
    watching = cast(AsyncGenerator[Pin], pins.watch())
    assert await anext(watching) == Pin(Version(0, 3), "evaluator-0")
    await watching.aclose()


async def test_deaths_that_are_no_count_are_none(memory_bus: MemoryBus) -> None:
    for value in (ANSWER, b"9" * 5000, b"-1"):
        await memory_bus.kv.put("attempts/7", value)
        assert await Attempts(memory_bus).load(7) == 0


async def test_a_checkpoint_of_no_rollout_is_passed_over(memory_bus: MemoryBus) -> None:
    mine = RolloutCheckpoints(memory_bus)
    await mine.save(7, 0, b"state")
    await memory_bus.kv.put("checkpoints/7/x", ANSWER)
    assert await RolloutCheckpoints(memory_bus).load(7) == {0: b"state"}
