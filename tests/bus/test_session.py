"""Readers without consumers: what they do when they are slower than the writers, and when news of a message does not reach them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import cast

import pytest
import pytest_asyncio

from streamrl.bus import connect
from streamrl.bus.jetstream import admin, session
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.jetstream.session import BATCH, WAITING, Session, opened
from streamrl.bus.jetstream.wire import Stored
from streamrl.bus.protocol import KeyEntry
from streamrl.bus.reading import first_gone, stretch
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from streamrl.errors import BusError, LogTruncated
from streamrl.schemas.subjects import Subjects
from tests.support.processes import until

pytestmark = pytest.mark.nats

TO = Subjects("run")


@pytest_asyncio.fixture
async def bus(own_server: NatsServer) -> AsyncIterator[JetStreamBus]:
    bus = await connect(own_server.address, "run", BusConfig(patience_s=60.0))
    yield bus
    await bus.close()


@asynccontextmanager
async def following(bus: JetStreamBus, subject: str | None = None) -> AsyncIterator[Session]:
    """A session that has read the one message there is."""
    await bus.publish(subject or TO.marks, b"first")
    one = await opened(bus.connection, "run-samples", after=0, subject=subject)
    try:
        assert await sequences(one, 1) == [1]
        while not one.at_end:
            assert await one.next(asyncio.get_running_loop().time() + 0.05) is None
        yield one
    finally:
        await one.close()


async def sequences(one: Session, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            message = await one.next()
            assert message is not None
            found.append(message.sequence)
    return found


async def store(bus: JetStreamBus, count: int, subject: str = TO.marks) -> None:
    await asyncio.gather(*(bus.publish(subject, b"x") for _ in range(count)))


@asynccontextmanager
async def deaf(one: Session) -> AsyncIterator[None]:
    """What is repeated meanwhile does not reach the session."""
    sink = one.sink
    assert sink is not None
    handler, sink.handler = sink.handler, lambda message: None
    yield
    await asyncio.sleep(0.2)
    sink.handler = handler


async def test_a_reader_that_is_slower_than_the_writers_holds_a_bounded_number_and_misses_none(bus: JetStreamBus) -> None:
    async with following(bus) as one:
        await store(bus, WAITING + 3 * BATCH)
        assert len(one.repeated) <= WAITING + 1 and one.sink is None
        assert await sequences(one, WAITING + 3 * BATCH) == list(range(2, WAITING + 3 * BATCH + 2))
        late = asyncio.create_task(sequences(one, 2))
        await until(lambda: one.sink is not None)  # it listens again
        await store(bus, 2)
        assert await late == [WAITING + 3 * BATCH + 2, WAITING + 3 * BATCH + 3]


@pytest.mark.parametrize("subject", [None, TO.marks])
async def test_missed_news_is_seen_by_the_next(bus: JetStreamBus, subject: str | None) -> None:
    async with following(bus, subject) as one:
        async with deaf(one):
            await store(bus, 5)
            await store(bus, 1, TO.rewards)
        await store(bus, 1)
        assert await sequences(one, 6 if subject else 7) == ([2, 3, 4, 5, 6, 8] if subject else [2, 3, 4, 5, 6, 7, 8])


async def test_missed_news_with_nothing_behind_it_is_found_in_the_stream(bus: JetStreamBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOOK_S", 0.5)
    async with following(bus) as one:
        async with deaf(one):
            await store(bus, 3)
        assert await sequences(one, 3) == [2, 3, 4]


async def test_what_was_removed_before_it_was_read_is_an_error_or_left_out_by_subject(bus: JetStreamBus) -> None:
    async with following(bus, TO.marks) as one:
        async with deaf(one):
            await store(bus, 3)
            await bus.trim("samples", through=4)
        await store(bus, 1)
        assert await sequences(one, 1) == [5]
    async with aclosing(bus.read("samples", after=4)) as reader:
        assert (await anext(reader)).sequence == 5
        await store(bus, 2)
        await bus.trim("samples", through=6)
        await store(bus, 1)
        # What had reached the reader before it was removed may still come.
        with pytest.raises(LogTruncated):
            async with asyncio.timeout(30), aclosing(bus.read("samples", after=5)) as late:
                await anext(late)


async def test_what_is_gone_from_the_middle_is_passed_over(bus: JetStreamBus) -> None:
    await store(bus, 5)
    for sequence in (2, 3):
        await bus.connection.request(f"{bus.connection.api}.STREAM.MSG.DELETE.run-samples", {"seq": sequence})
    async with asyncio.timeout(30), aclosing(bus.read("samples", after=0)) as reader:
        assert [(await anext(reader)).sequence for _ in range(3)] == [1, 4, 5]
    assert await first_gone(bus, "samples", range(9, 0, -1)) == 2
    assert await first_gone(bus, "samples", (1, 4, 5, 6)) is None
    await bus.connection.request(f"{bus.connection.api}.STREAM.MSG.DELETE.run-samples", {"seq": 5})
    assert [message.sequence async for message in stretch(bus, "samples", first=1, last=5)] == [1, 4]


@pytest.mark.parametrize("there", [(1, 300), (1, 100), ()], ids=str)
async def test_a_long_hole_is_not_gone_through_message_by_message(
    bus: JetStreamBus, monkeypatch: pytest.MonkeyPatch, there: tuple[int, ...]
) -> None:
    await store(bus, 300)
    gone = (sequence for sequence in range(1, 301) if sequence not in there)
    await asyncio.gather(*(bus.connection.request(f"{bus.connection.api}.STREAM.MSG.DELETE.run-samples", {"seq": one}) for one in gone))
    asked = list[str]()
    request = bus.connection.request

    async def counted(subject: str, *given: object) -> object:
        asked.append(subject)
        return await request(subject, *given)

    monkeypatch.setattr(bus.connection, "request", counted)
    first = (await bus.state("samples")).first
    async with asyncio.timeout(30):
        assert [message.sequence async for message in stretch(bus, "samples", first=first, last=299)] == [one for one in there if one < 300]
        assert len(asked) < 40, "about two for each time that it is halved"


async def test_what_is_there_is_not_passed_over_with_what_is_gone(bus: JetStreamBus, monkeypatch: pytest.MonkeyPatch) -> None:
    await store(bus, 5)
    await bus.connection.request(f"{bus.connection.api}.STREAM.MSG.DELETE.run-samples", {"seq": 2})
    following = Session.next

    async def skipping(one: Session, until: float | None = None) -> Stored | None:
        """A session that leaves out a message behind the hole."""
        message = await following(one, until)
        return await following(one, until) if message is not None and message.sequence == 3 else message

    monkeypatch.setattr(Session, "next", skipping)
    async with asyncio.timeout(30), aclosing(bus.read("samples", after=0)) as reader:
        assert (await anext(reader)).sequence == 1
        with pytest.raises(BusError, match="message 3 "):
            await anext(reader)


async def test_a_stretch_that_was_trimmed_is_an_error_and_not_empty(bus: JetStreamBus) -> None:
    await store(bus, 6)
    await bus.trim("samples", through=5)
    for last in (3, 5):
        with pytest.raises(LogTruncated):
            async with asyncio.timeout(30):
                [message async for message in stretch(bus, "samples", first=1, last=last)]
    assert [message.sequence async for message in stretch(bus, "samples", first=6, last=6)] == [6]
    assert [message async for message in stretch(bus, "samples", first=1, last=0)] == []


async def test_a_stream_that_repeats_nothing_is_read_too(bus: JetStreamBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that an earlier version made, and nobody who may has brought up to date."""
    monkeypatch.setattr(session, "LOOK_S", 0.5)
    config = (await admin.info(bus.connection, "run-samples")).config
    del config["republish"]
    await admin.change(bus.connection, "UPDATE", config)
    async with following(bus) as one:
        await store(bus, 3)
        assert await sequences(one, 3) == [2, 3, 4]
    again = await connect(bus.connection.address, "run", BusConfig())
    assert "republish" in (await admin.info(again.connection, "run-samples")).config
    await again.close()


async def test_news_that_overtakes_a_batch_already_asked_for_is_not_read_twice(bus: JetStreamBus) -> None:
    async with following(bus) as one:
        async with deaf(one):
            await store(bus, 100)
        await store(bus, BATCH + 100)
        last = BATCH + 201
        assert await sequences(one, last - 1) == list(range(2, last + 1))
        for number in range(3):
            one.look()
            assert await one.next(asyncio.get_running_loop().time() + 0.3) is None
            await store(bus, 1)
            assert await sequences(one, 1) == [last + 1 + number]
        assert one.position == last + 3


async def test_what_is_stored_below_the_keys_and_is_no_key_is_nobodys(bus: JetStreamBus) -> None:
    """A role may publish to any subject of three tokens below `pins`, also such that no key has."""
    for name in ("a$b", "0-3\N{SUPERSCRIPT TWO}", "sound"):
        await bus.connection.request(f"$KV.run.pins.policy.0-3.{name}", b"evaluation")
    assert await bus.kv.keys("pins/policy/") == ["pins/policy/0-3/sound"]
    assert list(await bus.kv.values("pins/policy/")) == ["pins/policy/0-3/sound"]
    async with asyncio.timeout(30), aclosing(cast(AsyncGenerator[KeyEntry], bus.kv.watch("pins/policy/"))) as watching:
        assert (await anext(watching)).key == "pins/policy/0-3/sound"
        await bus.connection.request("$KV.run.pins.policy.0-3.c%d", b"evaluation")
        await bus.kv.put("pins/policy/0-3/later", b"")
        assert (await anext(watching)).key == "pins/policy/0-3/later"
