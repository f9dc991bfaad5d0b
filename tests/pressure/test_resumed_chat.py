"""A producer is killed between two turns of a chat; another process goes on with the next turn, token for token."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.bus.server import NatsServer
from streamrl.errors import BusError, SchemaError
from streamrl.producers.checkpoints import MAX_BYTES, RUN_BYTES, RolloutCheckpoints
from streamrl.runtime.lock import lock_run
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.samples import Sample
from streamrl.schemas.subjects import PREFIX_CHECKPOINTS, SAMPLES, kind_of
from tests.support.world.nursery import Nursery
from tests.support.world.world import World, table_config, world

PRODUCER = '''
import json
import time
from pathlib import Path

FOLDER = Path(__file__).parent


async def three_turns(task, engine):
    """Two turns, then a pause that only a second process leaves: the first is killed in it."""
    chat = engine.chat(task)
    name = f"{task.index}.{engine.context.rollout_index}"
    found = len(chat.turns)
    while len(chat.turns) < 3:
        if chat.turns:
            chat.append((7, 8))
        await chat.generate(max_new_tokens=4)
        await chat.save({"turns": len(chat.turns)})
        if len(chat.turns) == 2:
            (FOLDER / f"{name}.writing").write_text(json.dumps(columns(chat)))
            (FOLDER / f"{name}.writing").rename(FOLDER / f"saved-{name}.json")
            while not (FOLDER / "go-on").exists():
                time.sleep(0.05)
    (FOLDER / f"found-{name}.json").write_text(json.dumps([found, chat.state]))
    return chat.episode(reward=float(engine.context.rollout_index))


def columns(chat):
    segments = chat.episode().segments[1:]
    spans = [[span.length, span.version.number] for segment in segments for span in segment.spans]
    logprobs = [logprob for segment in segments for logprob in segment.logprobs or [0.0] * len(segment.token_ids)]
    return {"tokens": chat.token_ids, "logprobs": logprobs, "spans": spans}
'''


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
    async with world(config, own_server, children) as w, asyncio.timeout(60), w.around("engine", "trainer", "feeder"):
        with lock_run(w.run):  # what says that a run is up; its supervisor has it, where there is one
            first = await started(w)
            while not saved_turns(tmp_path):
                await asyncio.sleep(0.05)
            while not (keys := await w.bus.kv.keys(PREFIX_CHECKPOINTS)):
                await asyncio.sleep(0.05)
            first.send_signal(signal.SIGKILL)
            await first.wait()
            saved = saved_turns(tmp_path)
            (tmp_path / "go-on").touch()
            second = await started(w)
            samples = await first_samples(w)
            while await w.bus.kv.keys(PREFIX_CHECKPOINTS) and any([(await w.bus.kv.get(key)).value for key in keys]):  # type: ignore[union-attr]
                await asyncio.sleep(0.05)
            second.terminate()
            assert await second.wait() == 0
    assert sorted(sample.rollout for sample in samples) == [0, 1]
    for rollout, before in saved.items():
        assert json.loads((tmp_path / f"found-0.{rollout}.json").read_text()) == [2, {"turns": 3}]
        [sample] = [sample for sample in samples if sample.rollout == rollout]
        kept = len(before["tokens"])
        prompt = kept - len(before["logprobs"])
        assert sample.tokens[:kept].tolist() == before["tokens"] and len(sample.tokens) > kept
        assert sample.logprobs[prompt:kept].tolist() == np.float32(before["logprobs"]).tolist()
        spans = [[span.length, span.version.number] for span in sample.spans if span.version is not None]
        assert spans[: len(before["spans"])] == before["spans"]


def saved_turns(folder: Path) -> dict[int, dict[str, Any]]:
    """What the first process had after two turns of task 0, by rollout."""
    return {int(path.stem.rpartition(".")[2]): json.loads(path.read_text()) for path in folder.glob("saved-0.*.json")}


async def started(w: World) -> asyncio.subprocess.Process:
    """A producer in a process of its own, as the supervisor would start it."""
    command = [sys.executable, "-m", "streamrl", "worker", "producer", "--run", str(w.run.path), "--index", "0"]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL)


async def first_samples(w: World) -> list[Sample]:
    """The rows of the first message of samples, waiting for it."""
    async for message in w.bus.read(SAMPLES, after=0):
        if kind_of(message.subject) == "samples":
            return decode_samples(bytes(message.body)).rows()
    raise AssertionError("the stream ended")


async def test_checkpoints_are_bounded_replaced_and_removed(bus: Bus) -> None:
    mine, other = RolloutCheckpoints(bus), RolloutCheckpoints(bus)
    await mine.save(4, 0, b"older")
    await mine.save(4, 0, b"newer")
    await mine.save(4, 11, b"eleven")
    await mine.save(41, 0, b"another task's")
    assert await other.load(4) == {0: b"newer", 11: b"eleven"}
    with pytest.raises(SchemaError, match=f"may have {MAX_BYTES} bytes, got {MAX_BYTES + 1}"):
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
