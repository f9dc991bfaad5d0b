"""The publisher: what is announced, in which order, and what a restart or a failure makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import ANY

import numpy as np
import pytest

from streamrl.bus.protocol import Bus, Message
from streamrl.errors import StreamFull, WeightSyncError
from streamrl.schemas.codec import decode
from streamrl.schemas.subjects import WEIGHTS, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.telemetry.names import metric
from streamrl.weights.bus import BusTransport
from streamrl.weights.manifest import Content
from streamrl.weights.pins import Pins
from streamrl.weights.protocol import Part, Shard, Slice, WeightTransport
from streamrl.weights.publisher import Publisher
from streamrl.weights.shm import ShmTransport
from tests.support.errors import raises
from tests.support.wanted import host, slices

SUBJECTS = Subjects("r")


def shards(number: int) -> list[Shard]:
    data = np.full(32, number, np.float32)
    return [Shard(name="w", dtype="float32", global_shape=(32,), shape=(32,), data=data.view(np.uint8))]


def digest(number: int) -> str:
    return Content(shards(number)).digest


class Gated:
    """A transport whose `publish` waits until the test opens it."""

    def __init__(self, inner: WeightTransport) -> None:
        self._inner = inner
        self.begun: list[Version] = []
        self.entered = asyncio.Event()
        self.open = asyncio.Event()

    async def publish(self, version: Version, shards: Iterator[Shard]) -> Manifest:
        self.begun.append(version)
        self.entered.set()
        await self.open.wait()
        return await self._inner.publish(version, shards)

    def fetch(self, manifest: Manifest, wants: Sequence[Slice]) -> AsyncIterator[Part]:
        return self._inner.fetch(manifest, wants)

    async def holds(self, manifest: Manifest) -> bool:
        return await self._inner.holds(manifest)

    async def retire(self, older_than: Version) -> None:
        await self._inner.retire(older_than)


@pytest.fixture
def shm(memory_bus: Bus, tmp_path: Path) -> Iterator[Callable[[], ShmTransport]]:
    """Makes transports of the same folder, one after the other: each new one is a new process's."""
    made: list[ShmTransport] = []

    def make() -> ShmTransport:
        for transport in made:
            transport.close()
        made.append(ShmTransport(run="r", policy="policy", directory=tmp_path / "weights", pins=Pins(memory_bus.kv, "policy")))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def publisher(bus: Bus, transport: Any, **options) -> Publisher:
    return Publisher(bus, SUBJECTS, transport, policy="policy", loop=asyncio.get_running_loop(), **options)


async def offer(to: Publisher, number: int, epoch: int = 0) -> None:
    await asyncio.to_thread(to.offer, Version(epoch, number), digest(number), iter(shards(number)))


async def offer_and_wait(bus: Bus, to: Publisher, number: int) -> None:
    """Offer, and return once the manifest is stored, so that the next offer replaces nothing."""
    after = (await bus.state(WEIGHTS)).last
    await offer(to, number)
    async for _ in bus.read(WEIGHTS, after=after):
        return


async def close(one: Publisher) -> None:
    await asyncio.to_thread(one.close)


async def messages(bus: Bus) -> list[Message]:
    state = await bus.state(WEIGHTS)
    return [await bus.fetch(WEIGHTS, sequence) for sequence in range(state.first, state.last + 1)]


async def announced(bus: Bus) -> list[Manifest]:
    return [decode(bytes(message.body), Manifest) for message in await messages(bus)]


async def numbers(bus: Bus) -> list[int]:
    return [manifest.version.number for manifest in await announced(bus)]


async def test_versions_are_announced_in_order_with_the_ledgers_digest(memory_bus, shm):
    reported: list[dict[str, float]] = []

    async def report(values: dict[str, float]) -> None:
        reported.append(values)

    transport = shm()
    one = publisher(memory_bus, transport, keep=0, report=report)
    for number in range(3):
        await offer(one, number)
    await close(one)
    manifests = await announced(memory_bus)
    assert [(m.version.number, m.digest, m.transport, m.nbytes) for m in manifests] == [(n, digest(n), "shm", 128) for n in range(3)]
    assert [message.subject for message in await messages(memory_bus)] == ["r.weights.policy"] * 3
    for number, manifest in enumerate(manifests):
        data = b"".join([bytes(part.data) async for part in transport.fetch(manifest, slices(manifest))])
        assert data == host(shards(number)[0]).tobytes()
    assert len(reported) == 3 and all(values["weights/bytes_total"] == 128 for values in reported)
    assert all(metric(name).name == name for values in reported for name in values)


async def test_the_latest_wins_while_one_is_being_published(memory_bus, shm):
    gate = Gated(shm())
    one = publisher(memory_bus, gate)
    await offer(one, 0)
    await gate.entered.wait()
    for number in (1, 2, 3):
        await offer(one, number)
    gate.open.set()
    await close(one)
    assert await numbers(memory_bus) == [0, 3]


async def test_keep_all_publishes_every_version_and_holds_the_trainer_back(memory_bus, shm):
    gate = Gated(shm())
    one = publisher(memory_bus, gate, keep=0)
    loop = asyncio.get_running_loop()
    returned: asyncio.Queue[int] = asyncio.Queue()

    def train() -> None:
        for number in range(8):
            one.offer(Version(0, number), digest(number), shards(number))
            loop.call_soon_threadsafe(returned.put_nowait, number)

    training = asyncio.create_task(asyncio.to_thread(train))
    await gate.entered.wait()
    for number in range(5):  # one is being published, and four wait
        assert await returned.get() == number
    await asyncio.sleep(0.02)
    assert returned.empty()
    gate.open.set()
    await training
    await close(one)
    assert await numbers(memory_bus) == list(range(8))


async def test_the_newest_versions_and_pinned_ones_keep_their_bytes(memory_bus, shm):
    transport = shm()
    one = publisher(memory_bus, transport, keep=2)
    for number in range(6):
        if number == 3:
            await Pins(memory_bus.kv, "policy").hold(Version(0, 2), "evaluator-0")
        await offer_and_wait(memory_bus, one, number)
    await close(one)
    manifests = await announced(memory_bus)
    assert [m.version.number for m in manifests if await transport.holds(m)] == [2, 4, 5]


async def test_wrong_bytes_are_not_announced_and_surface_at_the_next_call(memory_bus, shm):
    one = publisher(memory_bus, shm())
    await asyncio.to_thread(one.offer, Version(0, 1), "0123456789abcdef", shards(1))
    with raises(WeightSyncError, version="0.1", expected="0123456789abcdef", got=digest(1)):
        await close(one)
    with raises(WeightSyncError, version="0.1", expected="0123456789abcdef", got=digest(1)):
        await offer(one, 2)
    assert await announced(memory_bus) == []


async def test_an_error_wakes_a_trainer_that_waits_for_room(memory_bus, shm):
    gate = Gated(shm())
    one = publisher(memory_bus, gate, keep=0)

    def train() -> None:
        for number in range(7):
            one.offer(Version(0, number), "bad", shards(number))

    training = asyncio.create_task(asyncio.to_thread(train))
    await gate.entered.wait()
    gate.open.set()
    with raises(WeightSyncError, version="0.0", expected="bad"):
        await training


async def test_closing_wakes_a_trainer_that_waits_for_room(memory_bus, shm):
    gate = Gated(shm())
    one = publisher(memory_bus, gate, keep=0)
    for number in range(5):
        await offer(one, number)
    training = asyncio.create_task(offer(one, 5))
    await gate.entered.wait()
    closing = asyncio.create_task(close(one))
    with raises(WeightSyncError, version="0.5", closed=True):
        await training
    gate.open.set()
    await closing
    assert await numbers(memory_bus) == list(range(5))


async def test_a_closed_publisher_takes_nothing(memory_bus, shm):
    one = publisher(memory_bus, shm())
    await offer(one, 1)
    await close(one)
    await close(one)
    assert await numbers(memory_bus) == [1]
    with raises(WeightSyncError, version="0.2", closed=True):
        await offer(one, 2)


async def test_a_restart_repeats_nothing_that_can_still_be_fetched(memory_bus, shm):
    for _ in range(2):
        one = publisher(memory_bus, shm())
        await offer(one, 1)
        await close(one)
    assert await numbers(memory_bus) == [1]


async def test_a_restart_republishes_lost_bytes_under_a_new_manifest(memory_bus, shm, tmp_path):
    one = publisher(memory_bus, shm())
    await offer(one, 1)
    await close(one)
    for path in (tmp_path / "weights").glob("*.weights"):
        path.unlink()
    transport = shm()
    two = publisher(memory_bus, transport)
    await offer(two, 1)
    await close(two)
    first, second = await announced(memory_bus)
    assert first.version == second.version and first.digest == second.digest and first.parts != second.parts
    assert await transport.holds(second)


async def test_a_restart_from_an_older_checkpoint_publishes_only_what_is_new(memory_bus, shm):
    one = publisher(memory_bus, shm(), keep=2)
    for number in (3, 4, 5):
        await offer_and_wait(memory_bus, one, number)
    await close(one)
    for number in (3, 4, 5, 6):
        two = publisher(memory_bus, shm(), keep=2)
        await offer(two, number)
        await close(two)
    assert await numbers(memory_bus) == [3, 4, 5, 6]


async def test_a_restart_that_derives_other_weights_must_fork_the_epoch(memory_bus, shm):
    one = publisher(memory_bus, shm())
    await offer(one, 1)
    await close(one)
    two = publisher(memory_bus, shm())
    await asyncio.to_thread(two.offer, Version(0, 1), digest(7), shards(7))
    with raises(WeightSyncError, version="0.1", published=ANY) as caught:
        await close(two)
    assert "epoch" in caught.value.hint
    three = publisher(memory_bus, shm())
    await asyncio.to_thread(three.offer, Version(1, 1), digest(7), shards(7))
    await close(three)
    assert [str(manifest.version) for manifest in await announced(memory_bus)] == ["0.1", "1.1"]


async def test_a_death_between_bytes_and_manifest_is_repeated_without_harm(memory_bus, shm):
    await shm().publish(Version(0, 1), iter(shards(1)))
    transport = shm()
    one = publisher(memory_bus, transport, keep=1)
    await offer(one, 1)
    await close(one)
    (manifest,) = await announced(memory_bus)
    assert await transport.holds(manifest)


async def test_an_id_from_before_the_stream_was_trimmed_does_not_swallow_a_manifest(memory_bus, shm, tmp_path):
    one = publisher(memory_bus, shm())
    await offer(one, 1)
    await close(one)
    await memory_bus.trim(WEIGHTS, through=(await memory_bus.state(WEIGHTS)).last)
    two = publisher(memory_bus, shm())
    await offer(two, 1)
    await close(two)
    assert await numbers(memory_bus) == [1]


async def test_a_message_that_is_no_manifest_stops_no_trainer(memory_bus, shm, caplog):
    await memory_bus.publish(SUBJECTS.weights("policy"), b"\xc1 no MessagePack")
    one = publisher(memory_bus, shm())
    await offer(one, 1)
    await close(one)
    last = await memory_bus.last(SUBJECTS.weights("policy"))
    assert decode(bytes(last.body), Manifest).version == Version(0, 1)
    assert "weights_manifest_unreadable" in caplog.text


async def test_mirrors_get_the_same_bytes(memory_bus, shm):
    mirror = BusTransport(memory_bus.blobs, run="r", policy="policy", part_bytes=50)
    one = publisher(memory_bus, shm(), keep=1, mirrors={"bus": mirror})
    for number in (1, 2):
        await offer_and_wait(memory_bus, one, number)
    await close(one)
    manifest = (await announced(memory_bus))[-1]
    assert {part.location for part in manifest.mirrors["bus"]} == set(await memory_bus.blobs.names())
    assert [part.nbytes for part in manifest.mirrors["bus"]] == [50, 50, 28]


async def test_a_full_bus_is_said_and_leaves_no_blobs(memory_bus):
    class Full:
        """The bus's blobs with room for two parts."""

        def __init__(self) -> None:
            self.room = 2

        async def put(self, name: str, data: bytes | memoryview) -> str:
            if self.room == 0:
                raise StreamFull("blobs: 0 bytes left")
            self.room -= 1
            return await memory_bus.blobs.put(name, data)

        async def get(self, name: str) -> bytes:
            return await memory_bus.blobs.get(name)

        async def delete(self, name: str) -> None:
            await memory_bus.blobs.delete(name)

        async def names(self) -> Sequence[str]:
            return await memory_bus.blobs.names()

    one = publisher(memory_bus, BusTransport(cast("Any", Full()), run="r", policy="policy", part_bytes=50))
    await offer(one, 1)
    with raises(WeightSyncError, size_bytes=128) as caught:
        await close(one)
    assert "bus.blobs_bytes" in caught.value.hint
    assert await memory_bus.blobs.names() == [] and await announced(memory_bus) == []
