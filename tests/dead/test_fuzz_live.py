"""Mutated messages between real ones, over a real server, through a live trainer: the run goes on and its books are in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.bus import BusAddress
from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.consumers.training.reader import open_message
from streamrl.core.records import Ended, Marked, Poison, Rewarded, Rollouts
from streamrl.errors import SchemaError
from streamrl.history.dead_letters import DeadLetters
from streamrl.history.replay import verify
from streamrl.launch.prepare import prepare
from streamrl.runtime.run_record import write_or_check
from streamrl.schemas.codec import decode
from streamrl.schemas.control import Grant
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import KEY_GRANTED, SAMPLES, Subjects
from tests.support.audit.audit import audit
from tests.support.bad_messages import GROUP, RUN, Author, Sent
from tests.support.harness import make_run, read_ledger, services
from tests.support.world.world import table_config

pytestmark = pytest.mark.nats
SIZES = [600, pytest.param(2000, marks=pytest.mark.soak)]
CHUNK = 40
PATIENCE = 10


async def send(bus: Bus, run: str, sent: Sent) -> int:
    """Publish as a foreign client would; 0 where the bus itself refuses the subject or a header."""
    try:
        return (await bus.publish(sent.subject.replace(RUN, run, 1), sent.body, headers=sent.headers)).sequence
    except SchemaError:
        return 0


async def vandalise(bus: Bus, run: str, number: int) -> tuple[int, int]:
    """Send so many messages; returns how many the bus took and the last sequence."""
    author, taken, last, seen = Author(11), 0, 0, 0
    while taken < number:
        entry = await bus.kv.get(KEY_GRANTED)
        grant = decode(entry.value, Grant) if entry and entry.value else Grant(9, 0, 0)
        pick = author.random
        chunk: list[Sent] = []
        for _ in range(CHUNK):
            # Few of them hit an open task, or nothing would ever be trained.
            task = pick.randrange(grant.retired + 1) if pick.random() < 0.97 else pick.randrange(grant.retired, grant.granted)
            chunk.append(author.valid(task, grant.version) if pick.random() < 0.1 else author.mutated(task, grant.version))
        sequences = await asyncio.gather(*(send(bus, run, sent) for sent in chunk))
        taken, last = taken + sum(sequence > 0 for sequence in sequences), max(last, *sequences)
        for _ in range(PATIENCE):  # let the run go on in between
            await asyncio.sleep(0.02)
            newest = await bus.last(Subjects(run).ledger("main"))
            if newest is not None and newest.sequence > seen:
                seen = newest.sequence
                break
    return taken, last


async def reached(bus: Bus, run: str, sequence: int) -> list[LedgerEntry]:
    """The ledger once an entry has decided on a sequence."""
    while True:
        entries = await read_ledger(bus, run)
        if entries and entries[-1].cursor >= sequence:
            return entries
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("number", SIZES)
async def test_nobody_dies_and_every_message_has_one_fate(
    tmp_path: Path, nats_bus: Bus, nats_address: BusAddress, run_id: str, number: int
) -> None:
    config: Config = table_config(
        tmp_path,
        run={"name": run_id, "steps": 100_000},
        tasks={"num_rollouts": GROUP, "batch_tasks": 3},
        reward={"kind": "random"},
        trainer={"checkpoint_every": 10},
    )
    run, config = make_run(tmp_path, config)
    await write_or_check(nats_bus, await prepare(config, run))
    async with services(config, run, nats_bus, ["engine", "producer", "feeder", "trainer"]):
        async with asyncio.timeout(120):
            taken, last = await vandalise(nats_bus, run_id, number)
            entries = await reached(nats_bus, run_id, last)
    entries = await read_ledger(nats_bus, run_id)
    report = await audit(nats_address.url, nats_address.user, nats_address.password, run_id)
    assert report.problems == []
    await check_books(nats_bus, run_id, entries, taken)
    replay = await verify(config, nats_bus, run.model_dir)
    assert replay.ok and replay.versions == len(entries), replay.lines


async def check_books(bus: Bus, run: str, entries: list[LedgerEntry], taken: int) -> None:
    """Trained + dropped + dead + noted = sent, up to the last entry's cursor."""
    cursor = entries[-1].cursor
    trained = {sequence for entry in entries for group in entry.used for sequence in group.sequences}
    drops = [drop for entry in entries for drop in entry.drops]
    poison = {drop.sequence for drop in drops if drop.reason == "poison" and not drop.rollouts}
    dropped = {drop.sequence for drop in drops} - poison - trained
    dead = {letter.sequence async for letter in DeadLetters(bus, Subjects(run)).letters()}
    assert {sequence for sequence in dead if sequence <= cursor} == poison
    assert not poison & trained
    pending = noted = 0
    ended = {group.task for entry in entries for group in entry.used} | {drop.task for drop in drops if drop.retires}
    async for message in bus.read(SAMPLES, after=0):
        record = open_message(message).record
        assert not isinstance(record, Poison) or message.sequence in dead or message.sequence > cursor
        if message.sequence <= cursor and message.sequence not in trained | dropped | poison:
            assert isinstance(record, Rollouts | Rewarded | Marked | Ended)
            noted += not isinstance(record, Rollouts)
            if isinstance(record, Rollouts):
                pending += 1
                assert record.task not in ended
        if message.sequence >= cursor:
            break
    assert len(trained) + len(dropped) + len(poison) + pending + noted == cursor >= taken
    assert len(trained) > taken // 70 and len(poison) > taken // 2
