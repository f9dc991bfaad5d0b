"""The reader ahead of the training thread: what it gives is each message judged by itself, in the stream's order, however they come."""

import asyncio
import time

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import BusConfig
from streamrl.consumers.training.reader import SMALL_BYTES, TOGETHER, Incoming, RecordReader, open_message, open_messages
from streamrl.core.records import Poison, Rollouts
from streamrl.errors import LogTruncated
from streamrl.schemas.codec import encode
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_TASK, SAMPLES, Subjects
from tests.support.rows import plain, sample

SUBJECTS = Subjects("run")


async def a_stream(count: int) -> MemoryBus:
    """Samples, and now and then what is none, is broken, or is too large to be decoded with others."""
    bus = MemoryBus("run", BusConfig())
    for task in range(count):
        label = "x" * SMALL_BYTES if task % 11 == 7 else None
        body, subject, headers = encode_samples([sample(k, task=task, label=label) for k in range(2)]), SUBJECTS.samples("main"), {}
        if task % 13 == 5:
            body, subject = encode(Tombstone(task=task, reason="failed", group_size=2)), SUBJECTS.tombstones("main")
        elif task % 17 == 9:
            body = body[:-300]
        elif task % 19 == 3:
            headers = {HEADER_DIGEST: "0" * 16}
        await bus.publish(subject, body, headers={HEADER_TASK: str(task), **headers})
    return bus


def described(incoming: Incoming) -> object:
    return incoming.record, incoming.samples and [plain(row) for row in incoming.samples.rows()], incoming.message


async def test_messages_opened_together_are_judged_as_each_by_itself() -> None:
    bus = await a_stream(60)
    messages = [await bus.fetch(SAMPLES, sequence) for sequence in range(1, 61)]
    for start, size in ((0, 1), (0, 3), (20, 3), (10, 16), (0, 60)):  # 20 to 22: none is broken
        part = messages[start : start + size]
        assert [described(one) for one in open_messages(part)] == [described(open_message(message)) for message in part]
    kinds = [type(one.record) for one in open_messages(messages)]
    assert kinds.count(Rollouts) > 40 and kinds.count(Poison) >= 3
    assert open_messages([]) == []
    await bus.close()


@pytest.mark.parametrize("busy_s", [0.0, 0.05])
@pytest.mark.parametrize("capacity", [1, 7, 4 * TOGETHER])
async def test_a_thread_that_is_busy_now_and_then_gets_every_record_in_order(busy_s: float, capacity: int) -> None:
    count = 3 * TOGETHER + 5
    bus = await a_stream(count)
    reader = RecordReader(bus, asyncio.get_running_loop(), after=0, capacity=capacity)

    def read() -> list[int]:
        found = []
        while len(found) < count:
            incoming = reader.get(10.0)
            assert incoming is not None
            found.append(incoming.record.sequence)
            assert reader.waiting <= capacity
            if len(found) % 10 == 0:
                time.sleep(busy_s)
        assert reader.get(0.01) is None and reader.empty
        return found

    try:
        assert await asyncio.to_thread(read) == list(range(1, count + 1))
    finally:
        reader.close()
        await bus.close()


async def test_what_has_been_fetched_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.consumers.training.reader.GATHER_S", 3600.0)  # nothing is decoded before somebody wants it
    bus = await a_stream(2)
    reader = RecordReader(bus, asyncio.get_running_loop(), after=0, capacity=8)
    try:
        async with asyncio.timeout(60):
            while reader.empty:  # a batch must not be closed on less than all that is here
                await asyncio.sleep(0)
        assert [(await asyncio.to_thread(reader.get, 5.0)).record.sequence for _ in range(2)] == [1, 2]  # type: ignore[union-attr]
        assert reader.empty
    finally:
        reader.close()
        await bus.close()


async def test_an_error_comes_after_what_was_read_before_it() -> None:
    bus = await a_stream(TOGETHER + 3)
    read = bus.read

    async def breaking(stream, *, after, subject=None):
        async for message in read(stream, after=after):
            yield message
            if message.sequence == TOGETHER + 2:
                raise LogTruncated("expected more")

    bus.read = breaking  # type: ignore[method-assign]
    reader = RecordReader(bus, asyncio.get_running_loop(), after=0, capacity=1000)
    for sequence in range(1, TOGETHER + 3):
        assert (await asyncio.to_thread(reader.get, 5.0)).record.sequence == sequence  # type: ignore[union-attr]
    with pytest.raises(LogTruncated):
        await asyncio.to_thread(reader.get, 5.0)
    reader.close()
    await bus.close()
