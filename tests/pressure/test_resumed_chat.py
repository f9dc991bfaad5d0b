"""A producer is killed between two turns of a chat; another process goes on with the next turn, token for token."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.bus.server import NatsServer
from streamrl.errors import BusError, SchemaError
from streamrl.producers.checkpoints import MAX_BYTES, RUN_BYTES, RolloutCheckpoints
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.subjects import PREFIX_CHECKPOINTS, SAMPLES
from tests.support.world.fuse import Spot
from tests.support.world.nursery import Nursery
from tests.support.world.world import table_config, world

PRODUCER = """
import json
from pathlib import Path


def tell(name, task, engine, what):
    with Path(__file__).with_name(f"{name}-{task.index}.{engine.context.rollout_index}").open("a") as file:
        file.write(json.dumps(what) + "\\n")


async def three_turns(task, engine):
    chat = engine.chat(task)
    tell("found", task, engine, len(chat.turns))
    while len(chat.turns) < 3:
        if chat.turns:
            chat.append((7, 8))
        await chat.generate(max_new_tokens=4)
        await chat.save({"turns": len(chat.turns)})
        segments = chat.episode().segments[1:]
        spans = [[span.length, span.version.number] for segment in segments for span in segment.spans]
        logprobs = [logprob for segment in segments for logprob in segment.logprobs or [0.0] * len(segment.token_ids)]
        tell("saved", task, engine, {"tokens": chat.token_ids, "logprobs": logprobs, "spans": spans})
    return chat.episode(reward=float(engine.context.rollout_index))
"""


@pytest.mark.nats
async def test_a_chat_outlives_its_producer(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    (tmp_path / "chats.py").write_text(PRODUCER)
    config = table_config(
        tmp_path,
        run={"steps": 1},
        model={"max_len": 64},
        tasks={"batch_tasks": 1, "num_rollouts": 2, "max_staleness": 0},
        producer={"function": f"{tmp_path / 'chats.py'}:three_turns"},
    )
    async with world(config, own_server, children) as w, w.around("engine", "trainer", "feeder"):
        await w.kill("producer", [Spot("put checkpoints", "after", 4)])
        told = {rollout: lines(tmp_path / f"saved-0.{rollout}") for rollout in range(2)}
        async with w.around("producer"):
            await w.finished()
            async with asyncio.timeout(60):
                while any([(await w.bus.kv.get(key)) for key in await w.bus.kv.keys(PREFIX_CHECKPOINTS)]):
                    await asyncio.sleep(0.05)
        samples = decode_samples(bytes((await w.bus.fetch(SAMPLES, 1)).body)).rows()
    assert sorted(sample.rollout for sample in samples) == [0, 1]
    found = {sample.rollout: lines(tmp_path / f"found-0.{sample.rollout}") for sample in samples}
    assert [begun for begun, _ in found.values()] == [0, 0] and sum(again for _, again in found.values()) == 4, "each turn that was saved"
    for sample in samples:
        before = told[sample.rollout][: found[sample.rollout][1]][-1]  # what was killed may have told of one turn less than it had saved
        kept = len(before["tokens"])
        prompt = kept - len(before["logprobs"])
        assert sample.tokens[:kept].tolist() == before["tokens"] and len(sample.tokens) > kept
        assert sample.logprobs[prompt:kept].tolist() == np.float32(before["logprobs"]).tolist()
        spans = [[span.length, span.version.number] for span in sample.spans if span.version is not None]
        assert spans[: len(before["spans"])] == before["spans"]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_checkpoints_are_bounded_replaced_and_removed(bus: Bus) -> None:
    mine, other = RolloutCheckpoints(bus), RolloutCheckpoints(bus)
    await mine.save(4, 0, b"older")
    await mine.save(4, 0, b"newer")
    await mine.save(4, 11, b"eleven")
    await mine.save(41, 0, b"another task's")
    assert await other.load(4) == {0: b"newer", 11: b"eleven"}
    with pytest.raises(SchemaError, match=str(MAX_BYTES + 1)):
        await mine.save(4, 0, bytes(MAX_BYTES + 1))
    await other.forget(4)
    assert await other.load(4) == {}
    assert await other.load(41) == {0: b"another task's"}


async def test_a_process_stores_no_more_than_its_budget(bus: Bus) -> None:
    mine = RolloutCheckpoints(bus)
    for rollout in range(17):
        await mine.save(1, rollout, bytes([1]) * MAX_BYTES)
    assert sorted(await mine.load(1)) == list(range(16))
    await mine.forget(1)
    await mine.save(2, 0, b"room again")
    assert await mine.load(2) == {0: b"room again"}


async def test_many_processes_leave_room_for_the_keys_that_a_run_lives_by(bus: Bus) -> None:
    """Each within its own budget, they had filled the stream of keys: no grant could be put, and the run stood still."""
    producers = [RolloutCheckpoints(bus) for _ in range(5)]
    each = [mine.save(task, rollout, bytes([1]) * MAX_BYTES) for rollout in range(16) for task, mine in enumerate(producers)]
    await asyncio.gather(*each)
    for number in range(8):
        await bus.kv.put("granted", bytes(MAX_BYTES - number))
    stored = [len(await mine.load(task)) for task, mine in enumerate(producers)]
    assert RUN_BYTES // MAX_BYTES - 1 <= sum(stored) <= RUN_BYTES // MAX_BYTES + 2 * len(producers), stored
    await asyncio.gather(*(mine.forget(task) for task, mine in enumerate(producers)))
    async with asyncio.timeout(60):
        while (await bus.kv.size()) > 2 * MAX_BYTES:  # what was removed goes within a second or two
            await asyncio.sleep(0.1)
    await producers[0].save(9, 0, b"room again")
    assert await producers[1].load(9) == {0: b"room again"}


async def test_what_could_not_be_removed_counts_and_goes_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_bus = MemoryBus("run")
    mine, put, away = RolloutCheckpoints(memory_bus), memory_bus.kv.put, True

    async def refuse(key: str, value: bytes, **options: Any) -> int:
        if away and not value:
            raise BusError("no room for so much as an empty value")
        return await put(key, value, **options)

    monkeypatch.setattr(memory_bus.kv, "put", refuse)
    for rollout in range(16):
        await mine.save(1, rollout, bytes([1]) * MAX_BYTES)
    await mine.forget(1)
    await mine.save(2, 0, b"no room")
    assert await RolloutCheckpoints(memory_bus).load(2) == {}, "all of the first task is still stored"
    away = False
    await mine.forget(2)
    await mine.save(3, 0, b"room again")
    assert await RolloutCheckpoints(memory_bus).load(1) == {}
    assert await RolloutCheckpoints(memory_bus).load(3) == {0: b"room again"}
