"""One contract for every `WeightTransport`: what a publisher puts is what a reader gets, or a WeightSyncError."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Protocol
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest

from streamrl.bus import Bus, connect
from streamrl.bus.memory.bus import MemoryBus
from streamrl.bus.server import NatsServer
from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.weights.bus import BusTransport
from streamrl.weights.pins import Pins
from streamrl.weights.protocol import Shard, Slice, WeightTransport
from streamrl.weights.shm import ShmTransport
from tests.support.errors import raises
from tests.support.wanted import slices

PART_BYTES = 1000
POLICY = "policy"


class Site(Protocol):
    """A place with a transport: how other processes reach it, and how to break it."""

    pins: Pins

    def transport(self, policy: str = POLICY) -> WeightTransport: ...
    async def corrupt(self, manifest: Manifest) -> None: ...
    async def lose(self, manifest: Manifest) -> None: ...


class ShmSite:
    def __init__(self, bus: Bus, directory: Path) -> None:
        self.pins = Pins(bus.kv, POLICY)
        self._directory = directory
        self._made: list[ShmTransport] = []

    def transport(self, policy: str = POLICY) -> WeightTransport:
        made = ShmTransport(run="r", policy=policy, directory=self._directory, pins=self.pins, part_bytes=PART_BYTES)
        self._made.append(made)
        return made

    async def corrupt(self, manifest: Manifest) -> None:
        path = self._directory / manifest.parts[1].location
        data = bytearray(path.read_bytes())
        data[manifest.parts[1].offset + 5] ^= 1
        path.write_bytes(data)

    async def lose(self, manifest: Manifest) -> None:
        (self._directory / manifest.parts[0].location).unlink()

    def close(self) -> None:
        for made in self._made:
            made.close()


class BusSite:
    def __init__(self, bus: Bus, anchor_every: int) -> None:
        self.pins = Pins(bus.kv, POLICY)
        self._blobs = bus.blobs
        self._anchor_every = anchor_every
        self._made: list[BusTransport] = []

    def transport(self, policy: str = POLICY) -> WeightTransport:
        made = BusTransport(
            self._blobs, run="r", policy=policy, pins=self.pins, part_bytes=PART_BYTES, anchor_every=self._anchor_every, threads=2
        )
        self._made.append(made)
        return made

    def close(self) -> None:
        for made in self._made:
            made.close()

    async def corrupt(self, manifest: Manifest) -> None:
        """The bus checks a blob against its own digest, so the whole blob is replaced by another good one."""
        part = manifest.parts[-1]
        data = bytearray(await self._blobs.get(part.location))
        data[-5] ^= 1
        await self._blobs.delete(part.location)
        await self._blobs.put(part.location, bytes(data))

    async def lose(self, manifest: Manifest) -> None:
        await self._blobs.delete(manifest.parts[-1].location)


def model(number: int) -> list[Shard]:
    """Versions that differ in a few elements, as those of a training run do."""
    rng = np.random.default_rng(0)
    shapes = {"embed.weight": ("bfloat16", (37, 16)), "head": ("float32", (16, 37)), "scale": ("float32", ()), "empty": ("int8", (0, 4))}
    items = {"bfloat16": 2, "float32": 4, "int8": 1}
    shards = []
    for name, (dtype, shape) in shapes.items():
        data = rng.integers(0, 256, int(np.prod(shape, dtype=int)) * items[dtype], dtype=np.uint8)
        data[number::131] += number
        shards.append(Shard(name=name, dtype=dtype, global_shape=shape, shape=shape, data=data))
    return shards


async def read(reader: WeightTransport, manifest: Manifest, wants: Sequence[Slice]) -> dict[int, int]:
    """Byte by position, of everything fetched; a byte fetched twice fails."""
    got: dict[int, int] = {}
    async for part in reader.fetch(manifest, wants):
        for position, byte in enumerate(bytes(part.data), part.start):
            assert position not in got
            got[position] = byte
    return got


def tensor(manifest: Manifest, name: str, data: dict[int, int]) -> bytes:
    spec = next(spec for spec in manifest.tensors if spec.name == name)
    return bytes(data[position] for position in range(spec.offset, spec.offset + spec.nbytes))


@pytest.fixture
def memory_bus() -> MemoryBus:
    return MemoryBus("r")


@pytest.fixture
async def nats_bus(own_server: NatsServer) -> AsyncIterator[Bus]:
    bus = await connect(own_server.address, "r")
    yield bus
    await bus.close()


NATS = [pytest.param("bus-nats", marks=pytest.mark.nats), pytest.param("deltas-nats", marks=pytest.mark.nats)]


@pytest.fixture(params=["shm", "bus-memory", "deltas-memory", *NATS])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    kind, _, where = request.param.partition("-")
    bus = request.getfixturevalue("nats_bus" if where == "nats" else "memory_bus")
    made = ShmSite(bus, tmp_path / "weights") if kind == "shm" else BusSite(bus, anchor_every=3 if kind == "deltas" else 1)
    yield made
    made.close()


async def publish(transport: WeightTransport, number: int) -> Manifest:
    return await transport.publish(Version(0, number), iter(model(number)))


async def test_a_version_arrives_bit_for_bit(site):
    manifest = await publish(site.transport(), 1)
    assert len(manifest.parts) > 2
    reader = site.transport()
    assert await reader.holds(manifest)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    data = await read(reader, wire, slices(manifest))
    for shard in model(1):
        assert tensor(manifest, shard.name, data) == shard.host().tobytes()


async def test_a_reader_gets_only_what_it_wants(site):
    manifest = await publish(site.transport(), 1)
    reader = site.transport()
    wants = (*slices(manifest, ["scale"]), Slice(990, 20))
    data = await read(reader, manifest, wants)
    assert len(data) == 4 + 20
    shards = {shard.name: shard for shard in model(1)}
    assert tensor(manifest, "scale", data) == shards["scale"].host().tobytes()
    assert [data[position] for position in range(990, 1010)] == list(shards["embed.weight"].host()[990:1010])
    assert await read(reader, manifest, ()) == {}


async def test_publishing_again_changes_nothing(site):
    publisher = site.transport()
    first = await publish(publisher, 1)
    assert await publish(publisher, 1) == first


async def test_one_version_cannot_have_two_contents(site):
    publisher = site.transport()
    await publish(publisher, 1)
    with raises(WeightSyncError, version="0.1", published=ANY):
        await publisher.publish(Version(0, 1), iter(model(2)))


async def test_not_even_when_its_bytes_are_lost(site):
    publisher = site.transport()
    await site.lose(await publish(publisher, 1))
    with raises(WeightSyncError, version="0.1", published=ANY):
        await publisher.publish(Version(0, 1), iter(model(2)))


async def test_older_versions_are_freed_and_newer_ones_stay(site):
    """Each version by a publisher of its own: none is made from another."""
    publisher, reader = site.transport(), site.transport()
    manifests = [await publish(site.transport(), number) for number in range(4)]
    await publisher.retire(Version(0, 2))
    assert [await reader.holds(manifest) for manifest in manifests] == [False, False, True, True]
    assert await read(reader, manifests[2], slices(manifests[2]))
    with pytest.raises(WeightSyncError, match=r"policy 0\.1: ") as caught:
        await read(reader, manifests[1], slices(manifests[1]))
    assert "newer" in caught.value.hint
    await publisher.retire(Version(0, 2))


async def test_what_is_kept_can_be_fetched_by_who_holds_nothing(site):
    publisher = site.transport()
    manifests = [await publish(publisher, number) for number in range(8)]
    await site.pins.hold(Version(0, 2), "evaluator-0")
    await publisher.retire(Version(0, 7))
    for number in (2, 7):
        reader = site.transport()
        assert await reader.holds(manifests[number])
        data = await read(reader, manifests[number], slices(manifests[number]))
        for shard in model(number):
            assert tensor(manifests[number], shard.name, data) == shard.host().tobytes()


async def test_a_reader_takes_one_version_after_the_other_and_skips_some(site):
    publisher, reader = site.transport(), site.transport()
    for number in range(9):
        manifest = await publish(publisher, number)
        if number in (0, 1, 2, 5, 8):
            data = await read(reader, manifest, slices(manifest))
            assert all(tensor(manifest, shard.name, data) == shard.host().tobytes() for shard in model(number))


@pytest.mark.process
async def test_another_process_finds_the_whole_version_in_a_file(site):
    publisher, reader = site.transport(), site.transport()
    for number in range(3):
        manifest = await publish(publisher, number)
        async with reader.source(manifest) as source:
            command = [sys.executable, "-c", "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())", source.path]
            data = (await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)).stdout
        assert len(data) == manifest.nbytes
        for shard, spec in zip(sorted(model(number), key=lambda shard: shard.name), manifest.tensors, strict=True):
            assert data[spec.offset : spec.offset + spec.nbytes] == shard.host().tobytes()
    await site.lose(manifest)
    with pytest.raises(WeightSyncError, match=r"policy 0\.2: "):
        async with site.transport().source(manifest):
            pass


async def test_a_new_epoch_is_newer_than_any_number(site):
    publisher = site.transport()
    old = await publish(publisher, 9)
    new = await site.transport().publish(Version(1, 3), iter(model(3)))
    await publisher.retire(Version(1, 3))
    assert not await publisher.holds(old) and await publisher.holds(new)


async def test_pinned_versions_are_not_freed(site):
    publisher = site.transport()
    manifests = [await publish(site.transport(), number) for number in range(3)]
    await site.pins.hold(Version(0, 0), "evaluator-0")
    await publisher.retire(Version(0, 2))
    assert [await publisher.holds(manifest) for manifest in manifests] == [True, False, True]
    await site.pins.release(Version(0, 0), "evaluator-0")
    await publisher.retire(Version(0, 2))
    assert not await publisher.holds(manifests[0])


async def test_another_process_frees_what_a_dead_publisher_left(site):
    old = await publish(site.transport(), 1)
    successor = site.transport()
    await publish(successor, 2)
    await successor.retire(Version(0, 2))
    assert not await successor.holds(old)


async def test_other_policies_are_not_touched(site):
    publisher = site.transport()
    mine = await publish(publisher, 1)
    other = site.transport("critic")
    theirs = await publish(other, 1)
    await publisher.retire(Version(0, 5))
    assert not await publisher.holds(mine) and await other.holds(theirs)


async def test_lost_bytes_are_an_error_and_publishing_again_heals(site):
    publisher, reader = site.transport(), site.transport()
    manifest = await publish(publisher, 1)
    await site.lose(manifest)
    assert not await reader.holds(manifest)
    with pytest.raises(WeightSyncError, match=r"policy 0\.1: "):
        await read(reader, manifest, slices(manifest))
    again = await publish(publisher, 1)
    assert again.digest == manifest.digest
    assert {part.location for part in again.parts}.isdisjoint(part.location for part in manifest.parts)
    assert await read(reader, again, slices(again))


async def test_changed_bytes_are_an_error(site):
    manifest = await publish(site.transport(), 1)
    await site.corrupt(manifest)
    with raises(WeightSyncError, sha256=ANY):
        await read(site.transport(), manifest, slices(manifest))
