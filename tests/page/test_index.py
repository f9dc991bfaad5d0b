"""The page's index of runs, and its logs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from streamrl.bus.memory.bus import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.errors import LaunchError
from streamrl.monitor.metrics_file import CURRENT
from streamrl.monitor.numbers import Cause, Finding, Level
from streamrl.monitor.series import WINDOW, Row
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
from tests.page.conftest import batches, write
from tests.support.processes import until
from tests.support.rotation import EACH_LISTING, Rotation


def read(index: Index) -> None:
    while index.read_rows():
        pass


def test_rows_are_taken_once_over_restarts_files_that_are_put_aside_and_torn_ends(run: RunDir) -> None:
    # The least size of a file: these rows fill several.
    for first in range(1, 2001, 100):
        write(run, batches(first, first + 99), file_bytes=1 << 16)
        if first % 500 == 1:
            with open_index(run) as index:
                read(index)
    with (run.metrics / CURRENT).open("ab") as file:
        file.write(b'{"time_s":1,"kind":"bat')
    for _ in range(2):
        with open_index(run) as index:
            read(index)
            assert index.columns("batch", ["version"])["version"].tolist() == list(range(1, 2001))
            assert index.newest["rollout/raw_reward"] == 0.5
            progress = index.progress()
            assert 0 < progress.total - progress.done < 100  # the torn line


@EACH_LISTING
def test_rows_are_taken_once_whatever_a_listing_has(run: RunDir, monkeypatch: pytest.MonkeyPatch, rows: int, listing: str) -> None:
    write(run, batches(1, 9))
    files = Rotation(
        run.metrics, monkeypatch, lambda number: batches(number, number)[0], last=9, keep_bytes=1 << 20, rows=rows, listing=listing
    )
    with open_index(run) as index:
        for written in (0, 2, 1, 3, 2):
            files.write(written)
            files.room = 35
            read(index)
        assert index.columns("batch", ["version"])["version"].tolist() == list(range(1, files.number + 1))


def test_a_new_file_with_the_inode_of_one_that_has_gone_is_read_from_its_beginning(run: RunDir) -> None:
    """ext4 gives the inode of the oldest file, which goes, to the next new one."""
    current, gone = run.metrics / CURRENT, run.path / "gone"
    write(run, batches(1, 5))
    with open_index(run) as index:
        read(index)
    current.rename(gone)
    write(run, batches(6, 9))
    current.rename(run.metrics / "metrics-000002.jsonl")
    write(run, batches(10, 30))
    rows = current.read_bytes()
    current.unlink()
    gone.write_bytes(rows)
    gone.rename(current)
    for _ in range(2):
        with open_index(run) as index:
            read(index)
            assert index.columns("batch", ["version"])["version"].tolist() == list(range(1, 31))


def test_a_fork_replaces_batches_that_it_makes_void(run: RunDir) -> None:
    write(run, [*batches(1, 9), *batches(5, 6, epoch=1, reward=1.0)])
    with open_index(run) as index:
        read(index)
        series = index.series("batch", ["rollout/raw_reward"], x="version")
    assert series.x == [1, 2, 3, 4, 5, 6]
    assert series.values["rollout/raw_reward"] == [0.5] * 4 + [1.0] * 2


def test_many_batches_are_thinned_and_no_extreme_is_lost(run: RunDir) -> None:
    rows = batches(1, 10_000)
    rows[7777] = batches(7778, 7778, reward=99.0)[0]
    write(run, rows)
    with open_index(run) as index:
        read(index)
        series = index.series("batch", ["rollout/raw_reward"], x="version", most=500)
    assert len(series.x) == 500
    assert series.rows == 10_000
    assert max(value for value in series.values["rollout/raw_reward"] if value is not None) == 99.0


def test_amounts_of_windows_are_divided_by_the_seconds_between_rows(run: RunDir) -> None:
    name = "tokens/sampled_total"
    times = (0.0, 10.0, 15.0, 15.0, 45.0)
    write(run, [Row(time_s=1e9 + time_s, kind=WINDOW, values={name: 300.0, "lag/stream_s": 2.0}) for time_s in times])
    with open_index(run) as index:
        assert index.rate(WINDOW, name) is None
        read(index)
        rates = index.series(WINDOW, [name, "lag/stream_s"], rates=frozenset({name}))
        assert rates.values == {name: [None, 30.0, 60.0, None, 10.0], "lag/stream_s": [2.0] * 5}
        assert index.series(WINDOW, [name], rates=frozenset({name}), last=2).values[name] == [None, 10.0]
        assert index.series(WINDOW, [name]).values[name] == [300.0] * 5
        assert index.rate(WINDOW, name) == 10.0


def test_no_metrics_and_lines_that_are_no_rows_are_no_tables(run: RunDir) -> None:
    with open_index(run) as index:
        assert not index.read_rows()
        assert (index.tables(), index.progress().total) == ([], 0)
        assert index.series("batch", ["rollout/raw_reward"]).x == []
    write(run, batches(1, 1))
    with (run.metrics / CURRENT).open("ab") as file:
        file.write(b"\xff\xfe\n{}\n[1]\n" + b'{"time_s":1,"kind":"../../x","of":"","version":"0.1","step":1,"rollout/raw_reward":1}\n')
        file.write(b'{"time_s":1,"kind":"window","of":"../../x","version":"0.1","step":1,"rollout/raw_reward":1}\n')
        file.write(b'{"time_s":1,"kind":"window","of":"","version":"x","step":1,"rollout/raw_reward":1}\n')
    before = set(Path(run.path).iterdir())
    with open_index(run) as index:
        read(index)
        assert index.tables() == ["batch"]
    assert set(Path(run.path).iterdir()) - before <= {run.path / "page"}
    with open_index(run), pytest.raises(LaunchError, match="no other page"), open_index(run):
        pass
    with open_index(run):
        pass


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


async def test_a_log_that_is_read_anew_says_all_once_and_knows_objectives_of_long_ago(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
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
