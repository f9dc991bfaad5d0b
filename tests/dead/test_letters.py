"""Dead letters on both buses: kept whole, listed once, replayed by the fold's rules; a full or small bus stops nobody."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.bus.protocol import Bus, Message
from streamrl.config.tree import BusConfig
from streamrl.consumers.training.dead_letters import INLINE_BYTES, publish_dead_letter
from streamrl.consumers.training.ledger import open_ledger
from streamrl.consumers.training.reader import open_message
from streamrl.core.fold import DeadLetter
from streamrl.core.records import Poison, Rollouts
from streamrl.errors import NotFound, SchemaError
from streamrl.history.dead_letters import DeadLetters, Fates
from streamrl.schemas.codec import encode
from streamrl.schemas.dead import DeadRecord
from streamrl.schemas.digests import body_digest
from streamrl.schemas.ledger import Drop, LedgerEntry, Used
from streamrl.schemas.samples import RewardUpdate
from streamrl.schemas.subjects import DEAD, HEADER_DIGEST, HEADER_TASK, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from tests.support.bad_messages import patched, template
from tests.support.errors import raises

GOOD = patched(template((0, 1)), 3, 0)
BAD = GOOD.replace(
    (5).to_bytes(4, "little") + (6).to_bytes(4, "little"), (-1).to_bytes(4, "little", signed=True) + (6).to_bytes(4, "little")
)


async def send(bus: Bus, run: str, body: bytes, **headers: str) -> Message:
    receipt = await bus.publish(Subjects(run).samples("main"), body, headers={HEADER_TASK: "3"} | headers)
    return await bus.fetch(SAMPLES, receipt.sequence)


async def bury_it(bus: Bus, run: str, message: Message) -> str:
    record = open_message(message).record
    assert isinstance(record, Poison)
    await publish_dead_letter(bus, Subjects(run), message, DeadLetter(record.sequence, record.reason, record.task))
    return record.reason


async def test_a_letter_is_kept_with_bytes_headers_and_reason(bus: Bus, run_id: str) -> None:
    message = await send(bus, run_id, BAD, **{HEADER_DIGEST: body_digest(BAD), "X-Own": "mine"})
    reason = await bury_it(bus, run_id, message)
    await bury_it(bus, run_id, message)
    letters = DeadLetters(bus, Subjects(run_id))
    (listed,) = [letter async for letter in letters.letters()]
    assert listed == await letters.get(message.sequence)
    assert (listed.body, listed.headers, listed.reason, listed.task) == (BAD, dict(message.headers), reason, 3)
    assert listed.num_bytes == len(BAD) and listed.time_s > 0 and "token ids" in reason


async def test_a_letter_that_fits_no_message_goes_into_a_blob(bus: Bus, run_id: str) -> None:
    body = b"\x00\x01" * INLINE_BYTES
    message = await send(bus, run_id, body, **{HEADER_DIGEST: body_digest(body)})
    for _ in range(2):  # once more after a restart
        await bury_it(bus, run_id, message)
    letters = DeadLetters(bus, Subjects(run_id))
    (stub,) = [letter async for letter in letters.letters()]
    assert stub.body == b"" and stub.blob and stub.num_bytes == len(body)
    whole = await letters.get(message.sequence)
    assert whole.body == body and whole.headers == dict(message.headers)


async def test_letters_are_listed_once_until_they_are_trimmed_and_named_where_another_is_asked_for(bus: Bus, run_id: str) -> None:
    letters = DeadLetters(bus, Subjects(run_id))
    with raises(NotFound, sequence=9):
        await letters.get(9)
    for _ in range(3):
        await bury_it(bus, run_id, await send(bus, run_id, b"junk"))
    await bus.trim(DEAD, through=2)
    for _ in range(3):  # longer apart than message ids are remembered
        await bus.publish(Subjects(run_id).dead, encode(DeadRecord(stream=SAMPLES, sequence=5, subject="x", reason="r", body=b"b")))
    assert [letter.sequence async for letter in letters.letters()] == [3, 5]
    with raises(NotFound, sequence=9) as caught:
        await letters.replay(9)
    assert caught.value.message.endswith(": 3, 5") and "dead list" in caught.value.hint


async def test_a_repaired_letter_is_published_with_headers_of_its_own(bus: Bus, run_id: str) -> None:
    message = await send(bus, run_id, BAD, **{HEADER_TASK: "8", HEADER_DIGEST: body_digest(BAD), "X-Own": "mine"})
    await bury_it(bus, run_id, message)
    letters = DeadLetters(bus, Subjects(run_id))
    with raises(SchemaError, sequence=1):
        await letters.replay(1)
    with raises(SchemaError, sequence=1):
        await letters.replay(1, body=BAD)
    assert (await bus.state(SAMPLES)).last == 1, "nothing was published"
    replayed = await letters.replay(1, body=GOOD)
    assert (replayed.letter, replayed.sequence, replayed.task, replayed.duplicate) == (1, 2, 3, False)
    again = await bus.fetch(SAMPLES, 2)
    assert again.subject == message.subject and again.headers["X-Own"] == "mine" and again.headers[HEADER_TASK] == "3"
    assert isinstance(open_message(again).record, Rollouts)
    assert (await letters.replay(1, body=GOOD)).duplicate


async def test_a_letter_that_could_be_read_goes_out_as_it_was(bus: Bus, run_id: str) -> None:
    update = encode(RewardUpdate(task=10**6, rollout=0, reward=1.0))
    receipt = await bus.publish(Subjects(run_id).rewards, update, headers={HEADER_TASK: "1000000"})
    await publish_dead_letter(
        bus, Subjects(run_id), await bus.fetch(SAMPLES, receipt.sequence), DeadLetter(1, "had not been granted", 10**6)
    )
    replayed = await DeadLetters(bus, Subjects(run_id)).replay(1)
    again = await bus.fetch(SAMPLES, replayed.sequence)
    assert (again.body, dict(again.headers)) == (update, {HEADER_TASK: "1000000"}) and replayed.task == 10**6


async def test_a_full_bus_loses_the_letter_and_nothing_else(make_bus: Any, run_id: str, caplog: pytest.LogCaptureFixture) -> None:
    bus = await make_bus(BusConfig(blobs_bytes=100_000, samples_bytes=200_000_000, patience_s=20.0))
    message = await send(bus, run_id, b"\x00" * 2 * INLINE_BYTES)
    await bury_it(bus, run_id, message)
    assert f"event=dead_letter_lost sequence={message.sequence}" in caplog.text
    assert [letter async for letter in DeadLetters(bus, Subjects(run_id)).letters()] == []


def entry(number: int, *, used: tuple[Used, ...] = (), drops: tuple[Drop, ...] = (), cursor: int) -> LedgerEntry:
    return LedgerEntry(
        run="r", trainer="main", version=Version(0, number), source="main", used=used, drops=drops, cursor=cursor, granted=9, retired=1
    )


async def test_fates_are_read_off_the_ledger(bus: Bus, run_id: str) -> None:
    subjects = Subjects(run_id)
    ledger = await open_ledger(bus, subjects, "main", fence=1)
    await ledger.append(entry(1, used=(Used(0, (0, 1), (1, 2)),), drops=(Drop(3, 5, (), "poison", "junk", retires=True),), cursor=4))
    await ledger.append(entry(2, used=(Used(1, (0, 1), (5, 5)),), drops=(Drop(6, 0, (1,), "superseded_reward"),), cursor=7))
    fates = Fates(bus, subjects, "main")
    states = "trained trained quarantined accepted trained dropped accepted waiting"
    assert [(await fates.of_message(k)).state for k in range(1, 9)] == states.split()
    late = await fates.of_message(8, task=0)
    assert late.state == "dropped" and "task 0" in late.detail and "version 0.1" in late.detail
    assert (await fates.of_message(8, task=5)).detail.endswith("poison before version 0.1")
