"""The contract of the bus seam's keys, turns and blobs, on every adapter."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from streamrl.bus import Bus, KeyEntry
from streamrl.config.tree import BusConfig
from streamrl.errors import Conflict, NotFound, SchemaError, StreamFull

MakeBus = Callable[..., Awaitable[Bus]]


async def test_key_compare_and_set(bus: Bus) -> None:
    kv = bus.kv
    assert await kv.size() == 0
    assert await kv.get("granted") is None
    first = await kv.put("granted", b"1", expect=0)
    with pytest.raises(Conflict):
        await kv.put("granted", b"2", expect=0)
    second = await kv.put("granted", b"2", expect=first)
    assert second > first and await kv.get("granted") == KeyEntry("granted", b"2", second)
    with pytest.raises(Conflict):
        await kv.put("granted", b"3", expect=first)
    await kv.put("granted", b"3")
    await kv.delete("granted")
    await kv.delete("granted")
    await kv.delete("never-there")
    assert await kv.get("granted") is None
    await kv.put("granted", b"4", expect=0)
    before = await kv.size()
    await kv.put("checkpoints/1/0", bytes(10_000))
    assert 10_000 <= await kv.size() - before <= 10_500
    await kv.put("checkpoints/1/0", bytes(20_000))
    assert 20_000 <= await kv.size() - before <= 20_500, "it is in place of the one before"
    for key in ("", "a//b", "a.b", "/a", "a*"):
        with pytest.raises(SchemaError):
            await kv.put(key, b"x")


async def test_key_names(bus: Bus) -> None:
    for key in ("positions/b", "positions/a", "presence/engines/1", "positionless", "run"):
        await bus.kv.put(key, b"x")
    await bus.kv.delete("positions/b")
    assert await bus.kv.keys("positions/") == ["positions/a"]
    assert await bus.kv.keys("position") == ["positionless", "positions/a"]
    assert await bus.kv.keys("nothing/") == []
    assert await bus.kv.keys() == ["positionless", "positions/a", "presence/engines/1", "run"]


async def test_keys_expire_unless_put_again(bus: Bus) -> None:
    for ttl_s in (0.5, 1.5):
        with pytest.raises(SchemaError):
            await bus.kv.put("presence/a", b"x", ttl_s=ttl_s)
    await bus.kv.put("presence/kept", b"x", ttl_s=2)
    await bus.kv.put("presence/lost", b"x", ttl_s=1)
    await bus.kv.put("presence/made-permanent", b"x", ttl_s=1)
    await bus.kv.put("presence/made-permanent", b"x")
    async with asyncio.timeout(60):
        while await bus.kv.get("presence/lost") is not None:
            await bus.kv.put("presence/kept", b"x", ttl_s=30)
            await asyncio.sleep(0.25)
    assert await bus.kv.keys("presence/") == ["presence/kept", "presence/made-permanent"]
    await bus.kv.put("presence/lost", b"again", expect=0)


async def test_a_watch_gives_the_present_then_every_change(bus: Bus) -> None:
    await bus.kv.put("presence/old", b"1")
    await bus.kv.put("presence/gone", b"1")
    await bus.kv.put("other", b"1")
    await bus.kv.delete("presence/gone")
    seen: list[tuple[str, bytes | None]] = []
    async with asyncio.timeout(60), aclosing(bus.kv.watch("presence/")) as watch:  # type: ignore[type-var]
        seen.append(((entry := await anext(watch)).key, entry.value))
        await bus.kv.put("presence/new", b"2")
        await bus.kv.put("other", b"2")
        await bus.kv.put("presence/old", b"3")
        await bus.kv.delete("presence/old")
        await bus.kv.put("presence/short", b"4", ttl_s=1)
        while len(seen) < 6:
            seen.append(((entry := await anext(watch)).key, entry.value))
    old, new, short = (f"presence/{name}" for name in ("old", "new", "short"))
    assert seen == [(old, b"1"), (new, b"2"), (old, b"3"), (old, None), (short, b"4"), (short, None)]


async def test_a_watch_of_one_key_gives_nothing_of_others(bus: Bus) -> None:
    await bus.kv.put("granted", b"1")
    await bus.kv.put("granted-too", b"1")
    seen: list[tuple[str, bytes | None]] = []
    async with asyncio.timeout(60), aclosing(bus.kv.watch_key("granted")) as watch:  # type: ignore[type-var]
        seen.append(((entry := await anext(watch)).key, entry.value))
        for key in ("granted-too", "granted/under", "grant"):
            await bus.kv.put(key, b"2")
        await bus.kv.put("granted", b"2")
        await bus.kv.delete("granted")
        await bus.kv.put("granted", b"3")
        while len(seen) < 4:
            seen.append(((entry := await anext(watch)).key, entry.value))
    assert seen == [("granted", value) for value in (b"1", b"2", None, b"3")]
    for key in ("", "granted/", "a.b", "*"):
        with pytest.raises(SchemaError):
            bus.kv.watch_key(key)


async def test_turns_are_stored_once_under_a_number_and_removed_by_task(make_bus: MakeBus) -> None:
    bus = await make_bus(BusConfig(turns_bytes=200_000, patience_s=10))
    for key in ("5/0/0", "5/0/1", "5/1/0", "50/0/0", "6/0/0"):
        await bus.turns.put(key, key.encode(), expect=0, ttl_s=600.0)
    with pytest.raises(Conflict):
        await bus.turns.put("5/0/1", b"another's", expect=0, ttl_s=600.0)
    assert await bus.turns.values("5/") == {key: key.encode() for key in ("5/0/0", "5/0/1", "5/1/0")}
    assert await bus.kv.keys("5/") == [], "they are in a store of their own"
    await bus.turns.remove("5/")
    await bus.turns.remove("5/")
    assert await bus.turns.values("5/") == {} and await bus.turns.get("5/0/0") is None
    assert list(await bus.turns.keys()) == ["50/0/0", "6/0/0"]
    # Nothing of them stays: each may be there for the first time again.
    await bus.turns.put("5/0/0", b"again", expect=0)
    with pytest.raises(Conflict):
        await bus.turns.put("5/0/0", b"other", expect=0)
    number = 0
    with pytest.raises(StreamFull):
        for number in range(1, 100):
            await bus.turns.put(f"50/0/{number}", bytes(10_000), expect=0, ttl_s=600.0)
    await bus.kv.put("granted", b"1")  # the run's own keys have their room
    assert len(await bus.turns.values("50/")) == number, "what was there is there"
    await bus.turns.remove("50/")
    await bus.turns.put("51/0/0", bytes(10_000), expect=0, ttl_s=600.0)


@pytest.mark.parametrize("size", [0, 1, 10_000_000])
async def test_blobs_come_back_as_they_were(bus: Bus, size: int) -> None:
    data = os.urandom(size)
    assert await bus.blobs.put("weights/0.1/part-0", memoryview(data)) == hashlib.sha256(data).hexdigest()
    assert await bus.blobs.get("weights/0.1/part-0") == data
    assert await bus.blobs.names() == ["weights/0.1/part-0"]
    assert await bus.blobs.put("weights/0.1/part-0", data) == hashlib.sha256(data).hexdigest()
    with pytest.raises(Conflict):
        await bus.blobs.put("weights/0.1/part-0", data + b"x")
    await bus.blobs.delete("weights/0.1/part-0")
    await bus.blobs.delete("weights/0.1/part-0")
    assert await bus.blobs.names() == []
    with pytest.raises(NotFound) as caught:
        await bus.blobs.get("weights/0.1/part-0")
    assert caught.value.hint


async def test_a_blob_store_that_is_full_takes_smaller_blobs_still(make_bus: MakeBus) -> None:
    bus = await make_bus(BusConfig(blobs_bytes=6_000_000, patience_s=10))
    await bus.blobs.put("a", os.urandom(3_000_000))
    with pytest.raises(StreamFull) as caught:
        await bus.blobs.put("b", os.urandom(4_000_000))
    assert caught.value.hint and await bus.blobs.names() == ["a"]
    await bus.blobs.put("c", os.urandom(2_000_000))
    await bus.blobs.delete("a")
    await bus.blobs.put("b", os.urandom(3_000_000))
    assert await bus.blobs.names() == ["b", "c"]
