"""Pinned versions: the lease that keeps their bytes, the choice of what to serve, and two engines of which one stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.config.tree import EngineConfig
from streamrl.consumers.serving.weight_choice import choose_latest, choose_pinned
from streamrl.consumers.serving.weight_watcher import WeightWatcher
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.table.engine import TableEngine
from streamrl.schemas.codec import encode
from streamrl.schemas.control import EVALUATION_ROLE
from streamrl.schemas.subjects import WEIGHTS, Subjects
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.weights.bus import BusTransport
from streamrl.weights.manifest import Content
from streamrl.weights.pins import Pin, Pins
from streamrl.weights.publisher import Publisher
from tests.support.virtual import elapse, virtual
from tests.weights.tables import table, write_table

SUBJECTS = Subjects("r")
VOCAB = 24


def v(number: int, epoch: int = 0) -> Version:
    return Version(epoch, number)


def test_the_newest_is_served_or_the_one_so_many_before_it():
    announced = [v(number) for number in (0, 1, 2, 4, 5)]
    assert choose_latest([]) is None
    assert choose_latest(announced) == v(5)
    assert [choose_latest(announced, delay) for delay in (1, 2, 3, 9)] == [v(4), v(4), v(2), v(0)]
    assert choose_latest([*announced, v(4, 1)], 0) == v(4, 1)
    assert [choose_latest([*announced, v(4, 1), v(5, 1)], delay) for delay in (1, 3)] == [v(4, 1)] * 2, "not back to a lost one"


def test_a_pin_is_served_until_it_is_let_go():
    announced = {v(number) for number in (0, 1, 2, 5)}
    assert choose_pinned(announced, [], None) is None
    assert choose_pinned(announced, [v(1)], None) == v(1)
    assert choose_pinned(announced, [v(1)], v(1)) is None
    # The lower pin first; the other one when it is gone.
    assert choose_pinned(announced, [v(5), v(1)], None) == v(1)
    assert choose_pinned(announced, [v(5), v(1)], v(1)) is None
    assert choose_pinned(announced, [v(5)], v(1)) == v(5)
    # A version that was replaced before it was published; one that is still to come.
    assert choose_pinned(announced, [v(3)], v(1)) == v(5)
    assert choose_pinned(announced, [v(6)], v(1)) is None
    # There is no way back, and who asks for it blocks nobody.
    assert choose_pinned(announced, [v(1)], v(2)) is None
    assert choose_pinned(announced, [v(1), v(5)], v(2)) == v(5)
    # A version of an epoch that was forked at a lower number is no stand-in.
    assert choose_pinned({v(3, 1)}, [v(5)], v(2)) is None
    assert choose_pinned({v(3, 1), v(5, 1)}, [v(5)], v(2)) == v(5, 1)


@virtual
async def test_a_pin_lasts_as_long_as_its_holder_and_no_longer() -> None:
    bus = MemoryBus("r")
    pins = Pins(bus.kv, "policy")
    async with pins.held(v(3), "evaluator-0", ttl_s=1.0, role="evaluation"):
        await elapse(2.5)
        assert await pins.versions() == {v(3)}
    assert await pins.versions() == frozenset()
    # A holder that dies renews nothing.
    await pins.hold(v(4), "evaluator-0", ttl_s=1.0)
    await elapse(1.1)
    assert await pins.versions() == frozenset()
    # Who takes its name lets go of what it has left, and of nobody else's.
    await pins.hold(v(5), "evaluator-0", ttl_s=60.0)
    await pins.hold(v(6), "evaluator-0", ttl_s=60.0)
    await pins.hold(v(6), "evaluator-01", ttl_s=60.0)
    await pins.release_all("evaluator-0")
    assert await pins.versions() == {v(6)}
    assert await bus.kv.keys("pins/") == ["pins/policy/0-6/evaluator-01"]


@virtual
async def test_pins_are_seen_as_they_come_and_go() -> None:
    bus = MemoryBus("r")
    pins = Pins(bus.kv, "policy")
    await pins.hold(v(1), "a", role="evaluation")
    await bus.kv.put("pins/policy/no-version/a", b"")
    seen = aiter(pins.watch())
    assert await anext(seen) == Pin(v(1), "a", "evaluation")
    await pins.hold(v(2), "b", ttl_s=1.0)
    assert await anext(seen) == Pin(v(2), "b")
    await pins.release(v(1), "a")
    assert [await anext(seen), await anext(seen)] == [Pin(v(1), "a", live=False), Pin(v(2), "b", live=False)]


class Served:
    """A table engine with its watcher, as an engine worker has them."""

    def __init__(self, bus: Bus, model_dir: Path, name: str, role: str, backoff_s: float) -> None:
        self.engine = TableEngine(model_dir, EngineConfig(kind="table", slots=4), engine_id=name, policy="policy", max_len=1000)
        self.transport = BusTransport(bus.blobs, run="r", policy="policy", threads=1)
        self.committed: asyncio.Queue[Version] = asyncio.Queue()
        self.failed: asyncio.Queue[str] = asyncio.Queue()
        told: Any = {"event": self._event, "committed": self.committed.put}
        served: Any = {"policy": "policy", "engine": name, "backoff_s": backoff_s, "role": role}
        pins = Pins(bus.kv, "policy") if role == EVALUATION_ROLE else None
        self.watcher = WeightWatcher(bus, SUBJECTS, self.engine, {"bus": self.transport}, pins=pins, **served, **told)

    async def _event(self, _: str, detail: dict[str, Any]) -> None:
        if "error" in detail:
            await self.failed.put(detail["error"])

    async def token(self) -> int:
        request = GenerateRequest(request_id="q", prompt_ids=(0,), sampling=Sampling(max_new_tokens=1, ignore_eos=True), seeds=(7,))
        [token] = [token async for chunk in self.engine.generate(request) for token in chunk.token_ids]
        return token

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.engine.start()
        task = asyncio.create_task(self.watcher.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.transport.close()
            await self.engine.stop()


class Trainer:
    """The publishing side; one version is kept."""

    def __init__(self, bus: Bus) -> None:
        self.pins = Pins(bus.kv, "policy")
        self.transport = BusTransport(bus.blobs, run="r", policy="policy", pins=self.pins, part_bytes=500, anchor_every=3, threads=1)
        self.bus = bus
        self._publisher = Publisher(bus, SUBJECTS, self.transport, policy="policy", loop=asyncio.get_running_loop(), keep=1)

    async def publish(self, *numbers: int) -> None:
        for number in numbers:
            after = (await self.bus.state(WEIGHTS)).last
            await asyncio.to_thread(self._publisher.offer, v(number), Content(table(number, VOCAB)).digest, table(number, VOCAB))
            async for _ in self.bus.read(WEIGHTS, after=after):
                break

    async def close(self) -> None:
        await asyncio.to_thread(self._publisher.close)
        self.transport.close()


@pytest.fixture
def bus(request: pytest.FixtureRequest) -> Bus:
    return request.getfixturevalue(getattr(request, "param", "memory_bus"))


@pytest.fixture
async def trainer(bus: Bus) -> AsyncIterator[Trainer]:
    one = Trainer(bus)
    yield one
    await one.close()


@pytest.fixture
async def serve(bus: Bus, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def one(name: str, role: str, backoff_s: float = 0.05) -> Served:
            served = Served(bus, write_table(tmp_path, VOCAB), name, role, backoff_s)
            await stack.enter_async_context(served.running())
            return served

        yield one


async def test_an_evaluation_holds_a_version_while_others_move_on(trainer: Trainer, serve):
    """One version is kept, the anchor is three versions apart: the pin alone keeps what version 4 is made from."""
    async with asyncio.timeout(60):
        rollout, evaluation = await serve("engine-0", "rollout"), await serve("engine-1", EVALUATION_ROLE)
        await trainer.publish(*range(5))
        while await rollout.committed.get() != v(4):
            pass
        assert evaluation.watcher.serving is None
        async with trainer.pins.held(v(4), "evaluator-0", role=EVALUATION_ROLE):
            assert await evaluation.committed.get() == v(4)
            await trainer.publish(*range(5, 12))
            while await rollout.committed.get() != v(11):
                pass
            assert (await rollout.token(), await evaluation.token()) == (11, 4)
            # One that starts now finds the bytes; the versions between are gone.
            late = await serve("engine-2", EVALUATION_ROLE)
            assert await late.committed.get() == v(4)
            assert await late.token() == 4
        # It stays until the next one asks for another version.
        await trainer.publish(12)
        assert await rollout.committed.get() == v(12)
        assert await evaluation.token() == 4
        async with trainer.pins.held(v(12), "evaluator-0", role=EVALUATION_ROLE):
            assert await evaluation.committed.get() == v(12)
        await trainer.publish(13)
        assert {v(4)}.isdisjoint(await stored(trainer))


async def stored(trainer: Trainer) -> set[Version]:
    names = [name.split("/")[2].split("-") for name in await trainer.bus.blobs.names()]
    return {Version(int(epoch), int(number)) for epoch, number in names}


async def test_a_pinned_version_that_was_never_published_or_is_gone_stands_for_the_next(trainer: Trainer, serve):
    async with asyncio.timeout(60):
        evaluation = await serve("engine-1", EVALUATION_ROLE)
        await trainer.publish(0, 1, 3)
        async with trainer.pins.held(v(2), "evaluator-0", role=EVALUATION_ROLE):
            assert await evaluation.committed.get() == v(3)
        await trainer.publish(*range(4, 10))
        # Version 4 was retired before anybody pinned it; the newest is there, and what it is made from.
        async with trainer.pins.held(v(4), "evaluator-0", role=EVALUATION_ROLE):
            taken = await evaluation.committed.get()
            assert taken > v(4) and await evaluation.token() == taken.number
            assert "policy 0.4: " in await evaluation.failed.get()


async def until_pinned(pins: Pins, expected: set[Version]) -> None:
    async with asyncio.timeout(60):
        while await pins.versions() != expected:
            await asyncio.sleep(0.05)


async def publish_damaged(trainer: Trainer, bus: Bus, number: int) -> None:
    """Announce a version all of whose parts have a wrong bit."""
    manifest = await trainer.transport.publish(v(number), iter(table(number, VOCAB)))
    for part in manifest.parts:
        data = bytearray(await bus.blobs.get(part.location))
        data[-1] ^= 1
        await bus.blobs.delete(part.location)
        await bus.blobs.put(part.location, bytes(data))
    await bus.publish(SUBJECTS.weights("policy"), encode(manifest))


@pytest.mark.parametrize("bus", [pytest.param("nats_bus", marks=pytest.mark.nats)], indirect=True)
async def test_an_engines_own_pins_do_not_end_its_pause_after_a_failure(trainer: Trainer, serve, bus: Bus):
    async with asyncio.timeout(60):
        evaluation = await serve("engine-1", EVALUATION_ROLE, backoff_s=100.0)
        await publish_damaged(trainer, bus, 1)
        async with trainer.pins.held(v(1), "evaluator-0", role=EVALUATION_ROLE):
            assert "sha256" in await evaluation.failed.get()
            # The engine has let go of its own pin, and has seen that: what it sees comes in order.
            await until_pinned(trainer.pins, {v(1)})
            await trainer.pins.hold(v(1), "evaluator-1", role=EVALUATION_ROLE)
            assert "sha256" in await evaluation.failed.get()
            await until_pinned(trainer.pins, {v(1)})
            await asyncio.sleep(0.3)
            assert evaluation.failed.empty()
