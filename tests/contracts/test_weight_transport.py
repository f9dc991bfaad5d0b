"""One contract for every `WeightTransport`: what a publisher puts is what a reader gets, or a WeightSyncError."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest

from streamrl.bus import Bus
from streamrl.bus.memory.bus import MemoryBus
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


class Site:
    """A place with a transport: how other processes reach it, and how to break it."""

    def __init__(self, bus: Bus, directory: Path | None, anchor_every: int = 1) -> None:
        self.pins = Pins(bus.kv, POLICY)
        self._blobs = bus.blobs
        self._directory = directory
        self._anchor_every = anchor_every
        self._made: list[ShmTransport | BusTransport] = []

    def transport(self, policy: str = POLICY) -> ShmTransport | BusTransport:
        options: dict[str, Any] = {"run": "r", "policy": policy, "pins": self.pins, "part_bytes": PART_BYTES}
        if self._directory is not None:
            self._made.append(ShmTransport(directory=self._directory, **options))
        else:
            self._made.append(BusTransport(self._blobs, anchor_every=self._anchor_every, threads=2, **options))
        return self._made[-1]

    def close(self) -> None:
        for made in self._made:
            made.close()

    async def corrupt(self, manifest: Manifest) -> None:
        """The bus checks a blob against its own digest, so the whole blob is replaced by another good one."""
        part = manifest.parts[-1]
        if self._directory is not None:
            data = bytearray((self._directory / part.location).read_bytes())
            data[part.offset + 5] ^= 1
            (self._directory / part.location).write_bytes(data)
            return
        data = bytearray(await self._blobs.get(part.location))
        data[-5] ^= 1
        await self._blobs.delete(part.location)
        await self._blobs.put(part.location, bytes(data))

    async def lose(self, manifest: Manifest) -> None:
        if self._directory is not None:
            (self._directory / manifest.parts[-1].location).unlink()
        else:
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


def same(manifest: Manifest, data: dict[int, int], number: int, *names: str) -> bool:
    """Whether these tensors, or all, are those of the version."""
    specs = {spec.name: spec for spec in manifest.tensors if spec.name in names or not names}
    found = {name: bytes(data[position] for position in range(spec.offset, spec.offset + spec.nbytes)) for name, spec in specs.items()}
    return found == {shard.name: shard.host().tobytes() for shard in model(number) if shard.name in specs}


NATS = [pytest.param("bus-nats", marks=pytest.mark.nats), pytest.param("deltas-nats", marks=pytest.mark.nats)]


@pytest.fixture(params=["shm", "bus-memory", "deltas-memory", *NATS])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    kind, _, where = request.param.partition("-")
    bus = request.getfixturevalue("nats_bus") if where == "nats" else MemoryBus("r")
    made = Site(bus, tmp_path / "weights" if kind == "shm" else None, anchor_every=3 if kind == "deltas" else 1)
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
    assert same(manifest, await read(reader, wire, slices(manifest)), 1)


async def test_a_reader_gets_only_what_it_wants(site):
    manifest = await publish(site.transport(), 1)
    reader = site.transport()
    data = await read(reader, manifest, (*slices(manifest, ["scale"]), Slice(990, 20)))
    assert len(data) == 4 + 20
    assert same(manifest, data, 1, "scale")
    embed = next(shard for shard in model(1) if shard.name == "embed.weight")
    assert [data[position] for position in range(990, 1010)] == list(embed.host()[990:1010])
    assert await read(reader, manifest, ()) == {}


async def test_one_version_has_one_content_even_when_its_bytes_are_lost(site):
    publisher, reader = site.transport(), site.transport()
    manifest = await publish(publisher, 1)
    assert await publish(publisher, 1) == manifest
    with raises(WeightSyncError, version="0.1", published=ANY):
        await publisher.publish(Version(0, 1), iter(model(2)))
    await site.lose(manifest)
    assert not await reader.holds(manifest)
    with pytest.raises(WeightSyncError, match=r"policy 0\.1: "):
        await read(reader, manifest, slices(manifest))
    with raises(WeightSyncError, version="0.1", published=ANY):
        await publisher.publish(Version(0, 1), iter(model(2)))
    again = await publish(publisher, 1)
    assert again.digest == manifest.digest
    assert {part.location for part in again.parts}.isdisjoint(part.location for part in manifest.parts)
    assert same(again, await read(reader, again, slices(again)), 1)


async def test_older_versions_are_freed_and_newer_pinned_and_other_ones_stay(site):
    """Each version by a publisher of its own: none is made from another, and those that published the older ones may be dead."""
    publisher, reader, other = site.transport(), site.transport(), site.transport("critic")
    manifests = [await publish(site.transport(), number) for number in range(4)]
    theirs = await publish(other, 1)
    await site.pins.hold(Version(0, 0), "evaluator-0")
    await publisher.retire(Version(0, 2))
    assert [await reader.holds(manifest) for manifest in manifests] == [True, False, True, True]
    assert same(manifests[2], await read(reader, manifests[2], slices(manifests[2])), 2)
    with pytest.raises(WeightSyncError, match=r"policy 0\.1: ") as caught:
        await read(reader, manifests[1], slices(manifests[1]))
    assert "newer" in caught.value.hint
    await site.pins.release(Version(0, 0), "evaluator-0")
    # A new epoch is newer than any number.
    new = await site.transport().publish(Version(1, 3), iter(model(3)))
    await publisher.retire(Version(1, 3))
    assert [await publisher.holds(manifest) for manifest in (*manifests, new)] == [False] * 4 + [True]
    assert await other.holds(theirs)


async def test_what_is_kept_can_be_fetched_by_who_holds_nothing(site):
    publisher = site.transport()
    manifests = [await publish(publisher, number) for number in range(8)]
    await site.pins.hold(Version(0, 2), "evaluator-0")
    await publisher.retire(Version(0, 7))
    for number in (2, 7):
        reader = site.transport()
        assert await reader.holds(manifests[number])
        assert same(manifests[number], await read(reader, manifests[number], slices(manifests[number])), number)


async def test_a_reader_takes_one_version_after_the_other_and_skips_some(site):
    publisher, reader = site.transport(), site.transport()
    for number in range(9):
        manifest = await publish(publisher, number)
        if number in (0, 1, 2, 5, 8):
            assert same(manifest, await read(reader, manifest, slices(manifest)), number)


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


async def test_changed_bytes_are_an_error(site):
    manifest = await publish(site.transport(), 1)
    await site.corrupt(manifest)
    with raises(WeightSyncError, sha256=ANY):
        await read(site.transport(), manifest, slices(manifest))
