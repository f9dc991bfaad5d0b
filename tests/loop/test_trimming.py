"""Blobs of samples go with their samples: not before, and not later."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from streamrl.bus.jetstream import admin
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.protocol import Bus, Message
from streamrl.bus.topology import blobs_name, sample_bucket
from streamrl.config.tree import BusConfig
from streamrl.consumers.training import trimming
from streamrl.consumers.training.checkpoints import hold
from streamrl.consumers.training.trimming import nearly_full, release, trim_if_full
from streamrl.schemas.subjects import HEADER_TASK, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from tests.support.buses import MakeBus

BYTES = 10_000
CONFIG = BusConfig(sample_blobs_bytes=200_000, patience_s=10)


async def filled(make_bus: MakeBus, run: str, tasks: int) -> Bus:
    """A message and two blobs for each task, of which only one is named by a sample; every fifth ends with a tombstone."""
    bus, subjects = await make_bus(CONFIG), Subjects(run)
    for task in range(tasks):
        for rollout in range(2):
            await bus.sample_blobs.put(f"{task}/{rollout}.00000000", os.urandom(BYTES // 2))
        subject = subjects.tombstones("main") if task % 5 == 4 else subjects.samples("main")
        await bus.publish(subject, b"x", headers={HEADER_TASK: str(task)})
    return bus


async def tasks_of(bus: Bus) -> set[int]:
    return {int(name.partition("/")[0]) for name in await bus.sample_blobs.names()}


async def test_they_make_room_though_the_stream_itself_has_some(make_bus: MakeBus, run_id: str) -> None:
    bus = await filled(make_bus, run_id, 12)
    await hold(bus, "main", 8, Version(0, 1))
    assert not await nearly_full(bus) and not await trim_if_full(bus) and await tasks_of(bus) == set(range(12))
    for task in range(12, 16):
        await bus.sample_blobs.put(f"{task}/0.00000000", os.urandom(BYTES))
    assert await nearly_full(bus)
    assert not await trim_if_full(bus)
    assert (await bus.state(SAMPLES)).first == 8, "what the position holds is there"
    # Those of trimmed samples and tombstones are gone, named or not; those of tasks that have not ended are there.
    assert await tasks_of(bus) == set(range(7, 16))
    assert not await trim_if_full(bus), "nothing more to do"


async def test_what_a_checkpoint_holds_itself_stays_until_none_does(make_bus: MakeBus, run_id: str) -> None:
    bus = await filled(make_bus, run_id, 15)
    await hold(bus, "main", 13, Version(0, 1), carried=(2, 5))
    await hold(bus, "tap", 14, Version(0, 1), carried=(5,))
    await trim_if_full(bus)
    assert await tasks_of(bus) == {2, 5, 12, 13, 14}
    await hold(bus, "main", 13, Version(0, 2))
    await release(bus, {3: 2, 6: 5, 13: 12})
    assert await tasks_of(bus) == {5, 12, 13, 14}, "a tap's are there, and those whose message is"
    await hold(bus, "tap", 14, Version(0, 2))
    await release(bus, {6: 5})
    assert await tasks_of(bus) == {12, 13, 14}


async def test_a_second_trimmer_beside_the_first_changes_nothing(make_bus: MakeBus, run_id: str) -> None:
    bus = await filled(make_bus, run_id, 15)
    await hold(bus, "main", 10, Version(0, 1))
    await asyncio.gather(*(trim_if_full(bus) for _ in range(3)))
    assert await tasks_of(bus) == set(range(9, 15)) and (await bus.state(SAMPLES)).first == 10


async def test_a_trimmer_whose_messages_go_meanwhile_looks_again(make_bus: MakeBus, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's, with its checkpoint, beside the one that looks every second: it is no error that ends the trainer."""
    bus = await filled(make_bus, run_id, 15)
    await hold(bus, "main", 10, Version(0, 1))
    read, others = trimming.stretch, [4, 9]

    async def overtaken(bus: Bus, stream: str, *, first: int, last: int) -> AsyncIterator[Message]:
        if others:
            await bus.trim(SAMPLES, through=others.pop(0))
        async for message in read(bus, stream, first=first, last=last):
            yield message

    monkeypatch.setattr(trimming, "stretch", overtaken)
    assert await trim_if_full(bus), "these others trim, and leave the blobs"
    assert not others and (await bus.state(SAMPLES)).first == 10


@pytest.mark.nats
async def test_halves_of_blobs_are_swept_and_whole_ones_are_not(nats_bus: JetStreamBus, run_id: str) -> None:
    """What a producer leaves that dies in the middle of one: chunks that no description names."""
    bucket = sample_bucket(run_id)
    await nats_bus.sample_blobs.put("1/0.00000000", b"whole")

    async def messages() -> int:
        return (await admin.info(nats_bus.connection, blobs_name(bucket))).state.messages

    whole = await messages()
    for index in range(3):
        await nats_bus.outbox.publish(f"$O.{bucket}.C.half", b"x" * 100, id=f"half.{index}", headers={})
    assert await messages() == whole + 3
    await nats_bus.sample_blobs.sweep(60.0)
    assert await messages() == whole + 3, "its writer may be alive"
    await asyncio.sleep(1.1)
    await nats_bus.sample_blobs.sweep(1.0)
    assert await messages() == whole and await nats_bus.sample_blobs.get("1/0.00000000") == b"whole"
