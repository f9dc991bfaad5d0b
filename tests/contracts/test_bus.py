"""The contract of the bus seam, on every adapter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from streamrl.bus import Bus, Message
from streamrl.config.tree import BusConfig
from streamrl.errors import BusError, Conflict, LogTruncated, NotFound, SchemaError, StreamFull
from streamrl.schemas.subjects import Subjects
from tests.support.errors import raises

MakeBus = Callable[..., Awaitable[Bus]]


@pytest.fixture
def to(run_id: str) -> Subjects:
    return Subjects(run_id)


async def take(source: AsyncIterator[Message], count: int) -> list[Message]:
    """First `count` messages of a reader, which is then closed."""
    got: list[Message] = []
    async with asyncio.timeout(60), aclosing(source) as messages:  # type: ignore[type-var]
        while len(got) < count:
            got.append(await anext(messages))
    return got


async def test_messages_are_read_in_the_order_of_their_sequences_as_they_come(bus: Bus, to: Subjects) -> None:
    reader = asyncio.create_task(take(bus.read("samples", after=0), 3))
    await asyncio.sleep(0)
    for index in range(300):
        receipt = await bus.publish(to.samples("main"), b"%d" % index, headers={"Streamrl-Task": str(index)})
        assert (receipt.sequence, receipt.duplicate) == (index + 1, False)
    got = await take(bus.read("samples", after=0), 300)
    assert [(m.sequence, m.body, m.headers["Streamrl-Task"]) for m in got] == [(i + 1, b"%d" % i, str(i)) for i in range(300)]
    assert [m.sequence for m in await take(bus.read("samples", after=290), 10)] == list(range(291, 301))
    assert [m.sequence for m in await reader] == [1, 2, 3]


async def test_publishes_begun_one_after_the_other_are_stored_in_that_order(bus: Bus, to: Subjects) -> None:
    receipts = await asyncio.gather(*(bus.publish(to.samples("main"), b"%d" % index) for index in range(3000)))
    assert [receipt.sequence for receipt in receipts] == list(range(1, 3001))
    got = await take(bus.read("samples", after=0), 3000)
    assert [m.body for m in got] == [b"%d" % index for index in range(3000)]


async def test_all_kinds_of_a_stream_share_its_sequence_and_can_be_selected(bus: Bus, to: Subjects) -> None:
    order = [to.samples("main"), to.tombstones("main"), to.rewards, to.marks, to.samples("warmup"), to.rewards]
    for subject in order:
        await bus.publish(subject, b"x")
    assert [m.subject for m in await take(bus.read("samples", after=0), 6)] == order
    assert [m.sequence for m in await take(bus.read("samples", after=0, subject=to.rewards), 2)] == [3, 6]


async def test_a_repeated_id_is_stored_once_even_after_a_trim(bus: Bus, to: Subjects) -> None:
    first = await bus.publish(to.samples("main"), b"a", id="task-1")
    again = await bus.publish(to.rewards, b"b", id="task-1")
    assert (first.duplicate, again.duplicate, again.sequence) == (False, True, first.sequence)
    await bus.trim("samples", through=1)
    assert (await bus.publish(to.samples("main"), b"a", id="task-1")).duplicate
    assert (await bus.publish(to.samples("main"), b"a", id="task-2")).sequence == 2
    assert (await bus.publish(to.ledger("trainer"), b"a", id="task-1")).duplicate is False


async def test_expect_last_lets_one_of_two_writers_through(bus: Bus, to: Subjects) -> None:
    results = await asyncio.gather(
        *(bus.publish(to.ledger("trainer"), body, expect_last=0) for body in (b"a", b"b")), return_exceptions=True
    )
    lost = [result for result in results if isinstance(result, Conflict)]
    assert len(lost) == 1 and lost[0].values["expected"] == 0 and lost[0].values["actual"] == 1
    assert (await bus.state("ledger")).last == 1
    assert (await bus.publish(to.ledger("trainer"), b"c", expect_last=1)).sequence == 2


async def test_expect_subject_last_looks_at_one_subject_only(bus: Bus, to: Subjects) -> None:
    await bus.publish(to.ledger("one"), b"a", expect_subject_last=0)
    await bus.publish(to.ledger("two"), b"b", expect_subject_last=0)
    await bus.publish(to.ledger("one"), b"c", expect_subject_last=1)
    for subject, last in (("two", 3), ("three", 2)):
        with pytest.raises(Conflict):
            await bus.publish(to.ledger(subject), b"d", expect_subject_last=last)


async def test_a_repeated_compare_and_set_with_its_id_is_no_conflict(bus: Bus, to: Subjects) -> None:
    for number, body in enumerate((b"one", b"two")):
        await bus.publish(to.ledger("trainer"), body, id=f"v{number + 1}", expect_last=number)
    again = await bus.publish(to.ledger("trainer"), b"one", id="v1", expect_last=0)
    assert (again.sequence, again.duplicate) == (1, True)
    with pytest.raises(Conflict):
        await bus.publish(to.ledger("trainer"), b"other", id="v9", expect_last=0)


async def test_a_full_stream_refuses_and_goes_on_after_a_trim(make_bus: MakeBus, to: Subjects) -> None:
    bus = await make_bus(BusConfig(samples_bytes=300_000, patience_s=10))
    stored = 0
    with pytest.raises(StreamFull) as caught:
        while stored < 100:
            await bus.publish(to.samples("main"), bytes(10_000), id=str(stored))
            stored += 1
    assert caught.value.hint and 20 <= stored < 31
    state = await bus.state("samples")
    assert (state.last, state.messages, state.max_bytes) == (stored, stored, 300_000) and state.bytes <= 300_000
    await bus.trim("samples", through=10)
    receipt = await bus.publish(to.samples("main"), bytes(10_000), id=str(stored))
    assert (receipt.sequence, receipt.duplicate) == (stored + 1, False)
    assert (await bus.state("samples")).first == 11


async def test_state_and_identity(bus: Bus, to: Subjects) -> None:
    empty = await bus.state("samples")
    assert (empty.first, empty.last, empty.messages, empty.bytes) == (1, 0, 0, 0) and empty.identity
    for _ in range(4):
        await bus.publish(to.marks, b"x")
    await bus.trim("samples", through=2)
    state = await bus.state("samples")
    assert (state.first, state.last, state.messages, state.identity) == (3, 4, 2, empty.identity)
    await bus.trim("samples", through=100)
    state = await bus.state("samples")
    assert (state.first, state.last, state.messages) == (5, 4, 0)
    assert (await bus.publish(to.marks, b"x")).sequence == 5
    await bus.trim("samples", through=0)
    assert (await bus.state("samples")).messages == 1


async def test_reading_below_a_trim_says_what_is_missing(bus: Bus, to: Subjects) -> None:
    for _ in range(6):
        await bus.publish(to.marks, b"x")
    await bus.trim("samples", through=4)
    with pytest.raises(LogTruncated) as caught:
        await take(bus.read("samples", after=2), 1)
    assert (caught.value.values["needed"], caught.value.values["first"]) == (3, 5) and caught.value.hint
    assert [m.sequence for m in await take(bus.read("samples", after=4), 2)] == [5, 6]
    await bus.trim("samples", through=6)
    with pytest.raises(LogTruncated):
        await take(bus.read("samples", after=5), 1)


async def test_fetch_and_last(bus: Bus, to: Subjects) -> None:
    await bus.publish(to.weights("policy"), b"one", headers={"A": "1"})
    await bus.publish(to.weights("other"), b"two")
    await bus.publish(to.weights("policy"), b"three", headers={"A": "3"})
    message = await bus.fetch("weights", 1)
    assert (message.subject, message.sequence, message.body, dict(message.headers)) == (to.weights("policy"), 1, b"one", {"A": "1"})
    assert message.time_s > 1e9
    newest = await bus.last(to.weights("policy"))
    assert newest is not None and (newest.sequence, newest.body, dict(newest.headers)) == (3, b"three", {"A": "3"})
    assert await bus.last(to.weights("third")) is None
    with pytest.raises(NotFound):
        await bus.fetch("weights", 4)


async def test_the_first_message_from_a_sequence_on(bus: Bus, to: Subjects) -> None:
    assert await bus.first_from("weights", 0) is None
    for body in (b"1", b"2", b"3", b"4"):
        await bus.publish(to.weights("other" if body == b"2" else "policy"), body, headers={"A": body.decode()})
    for sequence, subject, expected in (
        (0, None, 1),
        (2, None, 2),
        (2, "policy", 3),
        (3, "other", None),
        (4, "policy", 4),
        (5, None, None),
    ):
        found = await bus.first_from("weights", sequence, subject=subject and to.weights(subject))
        assert (None if found is None else found.sequence) == expected
        assert found is None or (found.body, found.headers["A"]) == (b"%d" % expected, str(expected))
    await bus.trim("weights", through=2)
    found = await bus.first_from("weights", 1)
    assert found is not None and found.sequence == 3 and await bus.first_from("weights", 1, subject=to.weights("other")) is None


async def test_wrong_subjects_streams_headers_and_sizes_are_refused_before_they_are_sent(bus: Bus, to: Subjects) -> None:
    for subject in ("elsewhere.samples.main", f"{to.run}.unknown.main", f"{to.run}.samples.", to.run):
        with pytest.raises(SchemaError):
            await bus.publish(subject, b"x")
    with raises(BusError, stream="nothing"):
        await bus.state("nothing")
    with raises(BusError, stream="tasks", queue=True):
        await anext(aiter(bus.read("tasks", after=0)))
    for headers in ({"Nats-Msg-Id": "x"}, {"a b": "x"}, {"a": "x\r\ny: z"}):
        with pytest.raises(SchemaError):
            await bus.publish(to.marks, b"x", headers=headers)
    with pytest.raises(BusError, match="blob"):
        await bus.publish(to.marks, bytes(8 << 20))
    with pytest.raises(BusError, match="blob"):
        await bus.publish(to.marks, bytes(8_380_000), headers={"Large": "x" * 9000})
    assert (await bus.publish(to.marks, bytes(8_000_000))).sequence == 1


async def test_a_task_is_claimed_once_and_gone_when_done(bus: Bus, to: Subjects) -> None:
    for index in range(20):
        await bus.publish(to.tasks("main"), b"%d" % index, expect_last=index)
    await bus.publish(to.tasks("warmup"), b"w")
    shares = await asyncio.gather(*(bus.claim("main", max=6, wait_s=0.2) for _ in range(4)))
    leases = [lease for share in shares for lease in share]
    assert sorted(lease.sequence for lease in leases) == list(range(1, 21))
    assert all(lease.body == b"%d" % (lease.sequence - 1) and lease.deliveries == 1 for lease in leases)
    assert all(abs(lease.stored_s - time.time()) < 60 for lease in leases)
    assert await bus.claim("main", max=1, wait_s=0.0) == []
    for lease in leases:
        await lease.done()
    assert (await bus.state("tasks")).messages == 1
    (warm,) = await bus.claim("warmup", max=5, wait_s=1.0)
    assert (warm.body, warm.sequence) == (b"w", 21)


async def test_a_claim_waits_for_a_task(bus: Bus, to: Subjects) -> None:
    claim = asyncio.create_task(bus.claim("main", max=4, wait_s=10.0))
    await asyncio.sleep(0.1)
    await bus.publish(to.tasks("main"), b"x")
    (lease,) = await claim
    assert lease.body == b"x"
    assert await bus.claim("main", max=4, wait_s=0.1) == []


async def test_a_task_that_is_not_kept_alive_is_delivered_again(make_bus: MakeBus, to: Subjects) -> None:
    bus = await make_bus(BusConfig(ack_wait_s=1.0, patience_s=10))
    await bus.publish(to.tasks("main"), b"kept")
    await bus.publish(to.tasks("main"), b"lost")
    kept, lost = await bus.claim("main", max=2, wait_s=1.0)
    redelivered: list[tuple[bytes, int]] = []
    for _ in range(6):
        await kept.keep()
        for lease in await bus.claim("main", max=2, wait_s=0.25):
            redelivered.append((lease.body, lease.deliveries))
            await lease.done()
    assert redelivered == [(b"lost", 2)]
    await kept.done()
    await lost.done()
    assert (await bus.state("tasks")).messages == 0


async def test_a_task_can_be_given_back(bus: Bus, to: Subjects) -> None:
    await bus.publish(to.tasks("main"), b"x")
    (lease,) = await bus.claim("main", max=1, wait_s=1.0)
    await lease.retry()
    (lease,) = await bus.claim("main", max=1, wait_s=2.0)
    assert lease.deliveries == 2
    await lease.retry(delay_s=0.6)
    assert await bus.claim("main", max=1, wait_s=0.1) == []
    (lease,) = await bus.claim("main", max=1, wait_s=5.0)
    assert lease.deliveries == 3
    await lease.done()


async def test_a_cancelled_claim_loses_no_task(bus: Bus, to: Subjects) -> None:
    for _ in range(5):
        claim = asyncio.create_task(bus.claim("main", max=2, wait_s=10.0))
        await asyncio.sleep(0.02)
        claim.cancel()
        await asyncio.gather(claim, return_exceptions=True)
    await bus.publish(to.tasks("main"), b"x")
    (lease,) = await bus.claim("main", max=2, wait_s=3.0)
    assert lease.body == b"x"
