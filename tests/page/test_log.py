from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from streamrl.bus.memory.bus import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.monitor.numbers import Cause, Finding, Level
from streamrl.monitor.slo import detail_of
from streamrl.page.attention import Attention
from streamrl.page.index import LEDGER_TABLE, Index, open_index
from streamrl.page.log import RunLog
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import encode
from streamrl.schemas.events import NOTICE_EVENT, SLO_EVENT, Event
from streamrl.schemas.ledger import LedgerEntry, Used
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from tests.support.processes import until

SUBJECTS = Subjects("demo")


class Log(RunLog):
    """The log of a run that is up, on a bus of this process."""

    there: Bus
    times_opened = 0

    def _is_up(self) -> bool:
        return True

    @asynccontextmanager
    async def _opened(self, *, live: bool) -> AsyncGenerator[Bus]:
        self.times_opened += 1
        self._bus = self.there
        self._there.set()
        try:
            yield self.there
        finally:
            self._bus = None
            self._there.clear()


async def say(bus: Bus, text: str) -> None:
    await bus.publish(SUBJECTS.events(NOTICE_EVENT), encode(Event(kind=NOTICE_EVENT, worker="trainer", detail={"text": text})))


async def train(bus: Bus, number: int) -> None:
    kind = {"run": "demo", "trainer": "main", "source": "main", "cursor": number, "granted": 0, "retired": 0}
    entry = LedgerEntry(**kind, version=Version(0, number), used=(Used(1, (0,), (number,)),), digest=f"{number:016x}")
    await bus.publish(SUBJECTS.ledger("main"), encode(entry))


async def judge(bus: Bus, *findings: Finding) -> None:
    await bus.publish(SUBJECTS.events(SLO_EVENT), encode(Event(kind=SLO_EVENT, worker="supervisor", detail=detail_of(findings))))


@asynccontextmanager
async def followed(run: RunDir, bus: Bus) -> AsyncGenerator[tuple[Log, Index]]:
    """A log that has been read once."""
    with open_index(run) as index:
        log = Log(run, index, "main", Attention())
        log.there = bus
        following = asyncio.create_task(log.follow())
        try:
            await until(lambda: log.read_once, within_s=60)
            yield log, index
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_a_log_that_is_read_anew_says_everything_once_and_knows_objectives_from_long_ago(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.page.log._IDLE_S", 0.05)
    monkeypatch.setattr("streamrl.page.log._COMMIT_S", 0.02)
    monkeypatch.setattr("streamrl.page.log._LOOK_BACK", 2)
    bus = MemoryBus("demo")
    breach = Finding(objective="starvation", level=Level.BREACH, value=0.9, bound=0.5, causes=(Cause("few_producers", "why", "turn"),))
    await judge(bus, breach)
    for number in range(1, 4):
        await say(bus, f"note {number}")
        await train(bus, number)
    for earlier in (["note 1", "note 2", "note 3"], ["note 3", "note 4"]):  # the second one finds the index of the first, and looks back
        async with followed(run, bus) as (log, index):
            assert [note.text for note in log.notes] == earlier
            assert log.findings == (breach,)
            number = int(earlier[-1].removeprefix("note ")) + 1
            await say(bus, f"note {number}")
            await train(bus, number)
            before = log.times_opened
            while log.times_opened == before:  # nobody looks, so it has let go of the bus
                await log.bus()
                await asyncio.sleep(0.02)
            await until(lambda index=index, number=number: index.rows(LEDGER_TABLE) == number, within_s=60)
            await until(lambda log=log, number=number: log.notes[-1].text == f"note {number}", within_s=60)
            assert [note.text for note in log.notes] == [*earlier, f"note {number}"]
            assert index.columns(LEDGER_TABLE, ["version"])["version"].tolist() == list(range(1, number + 1))
    await judge(bus)
    async with followed(run, bus) as (log, _):
        assert log.findings == ()
