"""Anchors and deltas on a bus: late joiners, skipped versions, restarts, retention, corruption, deaths."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest

from streamrl.bus.protocol import Bus
from streamrl.errors import WeightSyncError
from streamrl.schemas.codec import decode
from streamrl.schemas.subjects import WEIGHTS, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.weights.bus import BusTransport
from streamrl.weights.links import routes
from streamrl.weights.manifest import Content, wire_bytes
from streamrl.weights.pins import Pins
from streamrl.weights.protocol import Shard
from streamrl.weights.publisher import Publisher
from tests.support.errors import raises
from tests.support.processes import until
from tests.support.wanted import fetched, filled, host

ROWS = 4096
EVERY = 4


def shards(number: int, rows: int = ROWS) -> list[Shard]:
    """A version differs from the one before in 20 of 8192 elements and in a scalar; `norm` never changes."""
    weight = np.random.default_rng(0).integers(0, 1 << 16, 2 * rows, dtype=np.uint16)
    for step in range(1, number + 1):
        weight[np.random.default_rng(step).integers(0, 2 * rows, 20)] += 1
    tensors = {
        "weight": ("bfloat16", weight.reshape(rows, 2)),
        "scale": ("float32", np.float32(number)),
        "norm": ("float32", np.ones(7, np.float32)),
    }
    return [
        Shard(name=name, dtype=dtype, global_shape=np.shape(one), shape=np.shape(one), data=np.atleast_1d(one).reshape(-1).view(np.uint8))
        for name, (dtype, one) in tensors.items()
    ]


def bytes_of(number: int) -> bytes:
    return filled(Content(shards(number))).tobytes()


class Counted:
    """The bus's blobs, with what was read of them."""

    def __init__(self, bus: Bus) -> None:
        self._blobs = bus.blobs
        self.read: list[str] = []

    async def get(self, name: str) -> bytes:
        self.read.append(name)
        return await self._blobs.get(name)

    def __getattr__(self, name: str):
        return getattr(self._blobs, name)


class Reader:
    """An engine's side, and the bytes it fetched since it was asked last."""

    def __init__(self, bus: Bus) -> None:
        self._blobs = Counted(bus)
        self.transport = BusTransport(cast("Any", self._blobs), run="r", policy="policy", threads=2)

    async def take(self, manifest: Manifest) -> bytes:
        return (await fetched(self.transport, manifest)).tobytes()

    def fetched(self) -> list[str]:
        """Which links were read: `anchor 4`, `delta 5`."""
        seen, self._blobs.read = self._blobs.read, []
        names = [name.split("/") for name in seen]
        return list(
            dict.fromkeys(f"{'anchor' if how == 'whole' else 'delta'} {version.split('-')[1]}" for _, _, version, _, how, _ in names)
        )


@pytest.fixture
def make(memory_bus: Bus) -> Iterator[Callable[..., BusTransport]]:
    made: list[BusTransport] = []

    def one(**options: Any) -> BusTransport:
        made.append(BusTransport(memory_bus.blobs, run="r", policy="policy", part_bytes=4000, anchor_every=EVERY, threads=2, **options))
        return made[-1]

    yield one
    for transport in made:
        transport.close()


@pytest.fixture
def reader(memory_bus: Bus) -> Iterator[Reader]:
    one = Reader(memory_bus)
    yield one
    one.transport.close()


async def publish(transport: BusTransport, *numbers: int) -> list[Manifest]:
    return [await transport.publish(Version(0, number), iter(shards(number))) for number in numbers]


def kinds(published: list[Manifest]) -> list[str]:
    return [manifest.kind for manifest in published]


async def test_most_versions_are_a_few_bytes_and_every_fourth_is_whole(make):
    published = await publish(make(), *range(9))
    assert kinds(published) == ["full", "delta", "delta", "delta", "full", "delta", "delta", "delta", "full"]
    assert [manifest.parent for manifest in published[1:4]] == [Version(0, number) for number in range(3)]
    assert all(wire_bytes(manifest) < 0.05 * manifest.nbytes for manifest in published if manifest.kind == "delta")
    # An anchor comes with its changes, for engines that hold the version before.
    assert all(manifest.nbytes < wire_bytes(manifest) < 1.05 * manifest.nbytes for manifest in published[4::4])


async def test_an_engine_that_skips_versions_reads_their_changes_and_a_late_joiner_the_newest_anchor(make, reader, memory_bus):
    published = await publish(make(), *range(11))
    steps = {2: ["anchor 0", "delta 1", "delta 2"], 6: [f"delta {n}" for n in range(3, 7)], 10: [f"delta {n}" for n in range(7, 11)]}
    for number, read in steps.items():
        assert await reader.take(published[number]) == bytes_of(number)
        assert reader.fetched() == read
    joiner = Reader(memory_bus)
    assert await joiner.take(published[7]) == bytes_of(7)
    assert joiner.fetched() == ["anchor 4", "delta 5", "delta 6", "delta 7"]
    joiner.transport.close()


@pytest.mark.parametrize(
    ("held", "newest", "read"), [(6, 9, ["delta 7", "anchor 8", "delta 9"]), (1, 15, ["anchor 12", "delta 13", "delta 14", "delta 15"])]
)
async def test_changes_that_were_retired_are_gone_round_by_an_anchor(make, reader, held, newest, read):
    """The manifest still names changes that lead from what the engine holds, but they went in the meantime; or it fell too far behind."""
    transport = make()
    published = await publish(transport, *range(newest + 1))
    await reader.take(published[held])
    await transport.retire(Version(0, newest))
    reader.fetched()
    assert await reader.take(published[newest]) == bytes_of(newest)
    assert reader.fetched() == read


async def test_an_older_version_and_other_tensors_begin_with_an_anchor_too(make):
    transport = make()
    await publish(transport, 0, 5)
    again = await publish(transport, 3, 4)
    assert kinds(again) == ["full", "delta"]
    other = await transport.publish(Version(0, 6), iter(shards(6, rows=ROWS + 1)))
    assert other.kind == "full"


async def test_a_version_with_everything_changed_is_stored_whole(make, memory_bus):
    transport = make()
    rng = np.random.default_rng(1)
    reader = Reader(memory_bus)
    for number in range(3):
        noise = msgspec.structs.replace(shards(0)[0], data=rng.integers(0, 256, 4 * ROWS, dtype=np.uint8))
        manifest = await transport.publish(Version(0, number), iter([noise]))
        assert (manifest.kind, wire_bytes(manifest)) == ("full", manifest.nbytes)
        assert await reader.take(manifest) == host(noise).tobytes()
    reader.transport.close()


async def test_changes_of_half_the_bytes_make_anchors_come_sooner(make, memory_bus):
    """float32 parameters change nearly everywhere, but their upper bytes do not: a late joiner never reads more than two versions."""
    transport, published = make(), []
    weight = np.random.default_rng(0).normal(size=2 * ROWS).astype(np.float32)
    for number in range(7):
        weight = weight + np.random.default_rng(number).normal(size=2 * ROWS).astype(np.float32) * 1e-4
        one = Shard(name="w", dtype="float32", global_shape=weight.shape, shape=weight.shape, data=weight.view(np.uint8))
        published.append(await transport.publish(Version(0, number), iter([one])))
        joiner = Reader(memory_bus)
        assert await joiner.take(published[-1]) == weight.tobytes()
        [way, *_] = routes(published[-1].links["bus"], Version(0, number))
        assert sum(link.nbytes for link in way) < 2 * published[-1].nbytes
        joiner.transport.close()
    assert kinds(published) == ["full", "delta", "delta", "full", "delta", "delta", "full"]


async def test_a_version_without_a_change_has_no_bytes(make, reader):
    transport = make()
    await publish(transport, 0)
    same = await transport.publish(Version(0, 1), iter(shards(0)))
    assert (same.kind, wire_bytes(same), same.parts) == ("delta", 0, ())
    assert await reader.transport.holds(same)
    assert await reader.take(same) == bytes_of(0)
    assert await reader.take((await publish(transport, 2))[0]) == bytes_of(2)


async def test_no_anchor_goes_that_a_kept_or_pinned_version_needs(make, memory_bus):
    pins = Pins(memory_bus.kv, "policy")
    transport = make(pins=pins)
    published = await publish(transport, *range(14))
    await pins.hold(Version(0, 5), "evaluator-0")
    await transport.retire(Version(0, 12))
    kept = {int(name.split("/")[2].split("-")[1]) for name in await memory_bus.blobs.names()}
    assert kept == {4, 5, 12, 13}
    assert await transport.holds(published[5]) and not await transport.holds(published[6])
    await pins.release(Version(0, 5), "evaluator-0")
    # By another process, which knows nothing but the names.
    await make(pins=pins).retire(Version(0, 13))
    assert {int(name.split("/")[2].split("-")[1]) for name in await memory_bus.blobs.names()} == {12, 13}


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_any_damaged_part_is_refused_and_a_good_version_is_taken_after_it(make, memory_bus, reader, number):
    """Parts of the anchor, of a change on the way, and of the newest change; each is replaced by one with another bit."""
    published = await publish(make(), 0, 1, 2)
    await reader.take(published[0])
    blobs = memory_bus.blobs
    for part in published[number].parts:
        good = await blobs.get(part.location)
        for position in (0, len(good) // 2, len(good) - 1):
            damaged = bytearray(good)
            damaged[position] ^= 16
            await blobs.delete(part.location)
            await blobs.put(part.location, bytes(damaged))
            joiner = Reader(memory_bus)
            with raises(WeightSyncError, sha256=ANY):
                await joiner.take(published[2])
            await blobs.delete(part.location)
            await blobs.put(part.location, good)
            assert await joiner.take(published[2]) == bytes_of(2)
            joiner.transport.close()


async def test_changes_of_another_version_are_refused_by_the_tensors_digest(make, memory_bus):
    """Every part is what the manifest says, but it is not what the version was made from."""
    published = await publish(make(), 0, 1, 2)
    *rest, last = published[2].links["bus"]
    swapped = msgspec.structs.replace(last, parts=published[1].parts)
    wrong = msgspec.structs.replace(published[2], parts=swapped.parts, links={"bus": (*rest, swapped)})
    reader = Reader(memory_bus)
    await reader.take(published[1])
    with raises(WeightSyncError, tensor=ANY):
        await reader.take(wrong)
    assert await reader.take(published[2]) == bytes_of(2)
    reader.transport.close()


async def test_a_part_that_is_missing_leaves_the_image_where_it_is(make, memory_bus, reader):
    published = await publish(make(), 0, 1, 2)
    await reader.take(published[1])
    [part] = published[2].parts
    good = await memory_bus.blobs.get(part.location)
    await memory_bus.blobs.delete(part.location)
    with raises(WeightSyncError, blob=ANY):
        await reader.take(published[2])
    await memory_bus.blobs.put(part.location, good)
    reader.fetched()
    assert await reader.take(published[2]) == bytes_of(2)
    assert reader.fetched() == ["delta 2"]


async def test_memory_of_an_image_goes_with_it(make, memory_bus):
    """Closed or dropped: an engine that is started anew in its process must not keep the image of the one before."""
    [manifest] = await publish(make(), 0)
    gc.collect()
    before = images()
    for how in ("closed", "dropped"):
        one = Reader(memory_bus)
        await one.take(manifest)
        assert images() > before
        if how == "closed":
            one.transport.close()
        del one
        await until(lambda: gc.collect() >= 0 and images() == before)  # a thread of its pool may still be on its way out


def images() -> int:
    """Descriptors of images that this process has open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum("streamrl-policy" in os.readlink(link) for link in links if os.path.lexists(link))


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("half", [False, True])
async def test_what_a_publisher_left_that_died_before_its_manifest_harms_nobody_and_goes(
    memory_bus: Bus, make: Callable[..., BusTransport], reader: Reader, number: int, half: bool
) -> None:
    """Version 2 is stored as changes, version 4 whole and as changes; nobody heard of either, and some of it may not have been stored."""
    await publish(make(), *range(number + 1))
    orphans = [name for name in await memory_bus.blobs.names() if f"/0-{number}/" in name]
    for name in orphans[: len(orphans) // 2 if half else 0]:
        await memory_bus.blobs.delete(name)
    transport = make()
    publisher = Publisher(memory_bus, Subjects("r"), transport, policy="policy", loop=asyncio.get_running_loop(), keep=1)
    for again in (number, number + 1):
        after = (await memory_bus.state(WEIGHTS)).last
        await asyncio.to_thread(publisher.offer, Version(0, again), Content(shards(again)).digest, shards(again))
        message = await anext(aiter(memory_bus.read(WEIGHTS, after=after)))
        manifest = decode(bytes(message.body), Manifest)
        assert manifest.kind == ("full" if again == number else "delta")
        assert not {part.location for part in manifest.parts} & set(orphans)
        assert await reader.take(manifest) == bytes_of(again)
    await asyncio.to_thread(publisher.close)
    # What the dead one left of a version that is needed goes with it.
    await transport.retire(Version(0, number + 2))
    assert not await memory_bus.blobs.names()
