"""The engine worker as a service: what it announces, how it swaps, how it drains, how it fails. Real engine, real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config, EngineConfig, EvaluationConfig, ModelConfig, RunConfig, SuperviseConfig
from streamrl.consumers.serving import engine_worker
from streamrl.errors import EngineError
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import decode
from streamrl.schemas.control import EnginePresence
from streamrl.schemas.events import MetricReport
from streamrl.schemas.subjects import METRICS
from streamrl.schemas.versions import Version
from streamrl.telemetry.states import STATES, seconds
from streamrl.weights.factory import free_weights, make_publisher
from streamrl.weights.manifest import Content
from tests.support.errors import raises
from tests.support.processes import until
from tests.weights.tables import table, write_table

PREFIX = "presence/engines/"


@pytest.fixture
def run_dir(tmp_path: Path):
    run = RunDir(tmp_path / "r")
    run.create()
    write_table(run.model_dir)
    yield run
    free_weights(config().weights, "r", run.path)


def config(**engine) -> Config:
    return Config(
        run=RunConfig(name="r"),
        engine=EngineConfig(kind="table", slots=4, **engine),
        model=ModelConfig(max_len=500),
        supervise=SuperviseConfig(drain_s=120.0),
    )


def worker_of(bus: Bus, run_dir: RunDir, tree: Config | None = None, *, index: int = 0) -> Worker:
    return Worker(config=tree or config(), run_dir=run_dir, bus=bus, kind="engine", index=index)


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """The worker's main; it drains when the test is done and must then end by itself."""
    task = asyncio.create_task(engine_worker.main(worker))
    try:
        yield task
    finally:
        worker.draining.set()
        await task


async def publish(bus: Bus, run_dir: RunDir, worker: Worker, number: int) -> None:
    place: Any = {"bus": bus, "subjects": worker.subjects, "policy": "policy", "run_dir": run_dir.path}
    publisher = make_publisher(worker.config.weights, **place, loop=asyncio.get_running_loop(), report=worker.metrics)
    await asyncio.to_thread(publisher.offer, Version(0, number), Content(table(number)).digest, table(number))
    await asyncio.to_thread(publisher.close)


async def presence(bus: Bus, *, serving: Version | None) -> EnginePresence:
    """Wait until an engine announces that it serves this version."""
    async for entry in bus.kv.watch(PREFIX):
        if entry.value is not None:
            found = decode(entry.value, EnginePresence)
            if found.serving == serving:
                return found
    raise AssertionError("the watch ended")


async def reported(bus: Bus, worker: str) -> set[str]:
    """Names of the amounts that a worker has reported."""
    state = await bus.state(METRICS)
    reports = [decode((await bus.fetch(METRICS, number)).body, MetricReport) for number in range(state.first, state.last + 1)]
    return {name for one in reports if one.worker == worker for name in one.sum}


def request_of(num_tokens: int) -> dict[str, Any]:
    return {"input_ids": [0], "return_logprob": True, "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True}}


async def generate(address: str, token: str, num_tokens: int) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {token}"}
    asked = aiohttp.ClientSession(headers=headers)
    async with asked as session, session.post(f"{address}/generate", json=request_of(num_tokens)) as response:
        return response.status, await response.json()


async def test_an_engine_announces_itself_serves_and_swaps(memory_bus, run_dir):
    worker = worker_of(memory_bus, run_dir)
    async with running(worker):
        await until(lambda: worker.state == "waits for its first weights", within_s=30)
        assert await memory_bus.kv.keys(PREFIX) == [], "nobody hears of it before it serves anything"
        await publish(memory_bus, run_dir, worker, 0)
        first = await presence(memory_bus, serving=Version(0, 0))
        assert (first.slots, first.policy) == (4, "policy")
        assert first.engine.startswith("engine-0-") and worker.state == "running"
        for number in (1, 2):
            await publish(memory_bus, run_dir, worker, number)
            found = await presence(memory_bus, serving=Version(0, number))
            assert (found.engine, found.address, found.swaps_total) == (first.engine, first.address, number + 1)
            status, answer = await generate(found.address, run_dir.engine_token(), 3)
            assert (status, answer["output_ids"]) == (200, [number] * 3)
    assert await memory_bus.kv.keys(PREFIX) == []


async def test_only_the_engines_of_rollouts_report_times(memory_bus, run_dir):
    tree = replace(config(), evaluation=EvaluationConfig(engines=1))
    for index in (0, 1):
        worker = worker_of(memory_bus, run_dir, tree, index=index)
        async with running(worker), asyncio.timeout(60):
            while "engine/tokens_total" not in await reported(memory_bus, f"engine-{index}"):
                await asyncio.sleep(0.05)
            await worker.tell_times()
    timed = {"engine/saturated_s", *(seconds("engine", state) for state in STATES["engine"])}
    assert timed & await reported(memory_bus, "engine-0") >= {"engine/saturated_s", "engine/setup_s"}
    assert not timed & await reported(memory_bus, "engine-1")


async def test_a_restarted_engine_is_another_engine_and_takes_the_newest_weights(memory_bus, run_dir):
    worker = worker_of(memory_bus, run_dir)
    await publish(memory_bus, run_dir, worker, 1)
    seen = []
    for _ in range(2):
        worker = worker_of(memory_bus, run_dir)
        async with running(worker):
            seen.append((await presence(memory_bus, serving=Version(0, 1))).engine)
    assert len(set(seen)) == 2


class Gate:
    """In the place of an artificial time per token: a completion gets a few tokens, and the others once it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self._free = 10

    def seconds(self, seeds: np.ndarray) -> np.ndarray:
        self._free -= 1
        if self._free < 0:
            self.open.wait(120)
        return np.zeros(len(seeds))


async def test_draining_lets_running_requests_finish_and_refuses_new_ones(memory_bus, run_dir, monkeypatch):
    gate = Gate()
    monkeypatch.setattr(engine_worker, "token_delay", lambda config: gate)
    worker = worker_of(memory_bus, run_dir)
    await publish(memory_bus, run_dir, worker, 1)
    task = asyncio.create_task(engine_worker.main(worker))
    address = (await presence(memory_bus, serving=Version(0, 1))).address
    entries = memory_bus.kv.watch(PREFIX)
    await anext(entries)
    body = {**request_of(400), "stream": True, "incremental": True}
    headers = {"Authorization": f"Bearer {run_dir.engine_token()}"}
    async with aiohttp.ClientSession() as session, session.post(f"{address}/generate", json=body, headers=headers) as response:
        results = [json.loads((await response.content.readline()).removeprefix(b"data: "))]
        worker.draining.set()
        while (await anext(entries)).value is not None:
            pass
        status, refusal = await generate(address, run_dir.engine_token(), 1)
        assert status == 400 and "draining" in refusal["error"]["message"]
        gate.open.set()
        lines = [line.removeprefix(b"data: ").strip() async for line in response.content if line.strip()]
    await task
    assert lines.pop() == b"[DONE]"
    results += [json.loads(line) for line in lines]
    assert sum(len(result["output_ids"]) for result in results) == 400
    assert results[-1]["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_taken_port_ends_the_worker_with_a_hint(memory_bus, run_dir):
    worker = worker_of(memory_bus, run_dir)
    await publish(memory_bus, run_dir, worker, 1)
    async with running(worker):
        port = int((await presence(memory_bus, serving=Version(0, 1))).address.rpartition(":")[2])
        with raises(EngineError, host="127.0.0.1", port=port) as caught:
            await engine_worker.main(worker_of(memory_bus, run_dir, config(port=port)))
    assert "engine.port" in caught.value.hint


def test_a_server_that_listens_everywhere_is_announced_where_others_reach_it():
    assert engine_worker.reachable("http://127.0.0.1:81", "127.0.0.1") == "http://127.0.0.1:81"
    name, _, port = engine_worker.reachable("http://0.0.0.0:81", "0.0.0.0").rpartition(":")
    assert name not in ("http://0.0.0.0", "http://") and port == "81"
    assert engine_worker.reachable("http://0.0.0.0:81", "0.0.0.0", bus_url="tls://127.0.0.1:4222") == "http://127.0.0.1:81"
    assert engine_worker.reachable("http://0.0.0.0:81", "0.0.0.0", advertise="gpu-3") == "http://gpu-3:81"
    assert engine_worker.reachable("http://0.0.0.0:81", "0.0.0.0", advertise="fd00::3") == "http://[fd00::3]:81"


async def test_an_error_in_any_part_ends_all_of_it():
    ended = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")

    async def broken() -> None:
        raise EngineError("decoding failed")

    with pytest.raises(EngineError, match="decoding failed"):
        await engine_worker.until_drained(asyncio.Event(), forever(), broken())
    assert ended == ["forever"]
