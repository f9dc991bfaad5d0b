"""The page's index of runs, its logs and its tables."""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.bus.memory.bus import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.config.slo import SloConfig
from streamrl.core.lengths import histogram
from streamrl.errors import LaunchError
from streamrl.monitor.metrics_file import CURRENT
from streamrl.monitor.numbers import Cause, Finding, Level
from streamrl.monitor.run_state import RunState, read_state, write_state
from streamrl.monitor.series import WINDOW, Row
from streamrl.monitor.slo import detail_of
from streamrl.page.attention import Attention
from streamrl.page.index import LEDGER_TABLE, Index, open_index
from streamrl.page.lengths import MOST_BARS, lengths_of
from streamrl.page.log import RunLog
from streamrl.page.objectives import objectives_of, worst_over
from streamrl.page.tables import Tables, as_json, shrink, shrink_to_means
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import encode
from streamrl.schemas.events import NOTICE_EVENT, SLO_EVENT, Event
from streamrl.schemas.ledger import LedgerEntry, Used
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from tests.page.conftest import batches, indexed, read, write
from tests.support.processes import until
from tests.support.rotation import EACH_LISTING, Rotation


def test_rows_are_taken_once_over_restarts_files_that_are_put_aside_and_torn_ends(run: RunDir) -> None:
    # The least size of a file: these rows fill several.
    for first in range(1, 2001, 100):
        write(run, batches(first, first + 99), file_bytes=1 << 16)
        if first % 500 == 1:
            with indexed(run):
                pass
    with (run.metrics / CURRENT).open("ab") as file:
        file.write(b'{"time_s":1,"kind":"bat')
    for _ in range(2):
        with indexed(run) as index:
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
    with indexed(run):
        pass
    current.rename(gone)
    write(run, batches(6, 9))
    current.rename(run.metrics / "metrics-000002.jsonl")
    write(run, batches(10, 30))
    rows = current.read_bytes()
    current.unlink()
    gone.write_bytes(rows)
    gone.rename(current)
    for _ in range(2):
        with indexed(run) as index:
            assert index.columns("batch", ["version"])["version"].tolist() == list(range(1, 31))


def test_a_fork_replaces_batches_that_it_makes_void(run: RunDir) -> None:
    write(run, [*batches(1, 9), *batches(5, 6, epoch=1, reward=1.0)])
    with indexed(run) as index:
        series = index.series("batch", ["rollout/raw_reward"], x="version")
    assert (series.x, series.values["rollout/raw_reward"]) == ([1, 2, 3, 4, 5, 6], [0.5] * 4 + [1.0] * 2)


def test_many_batches_are_thinned_and_no_extreme_is_lost(run: RunDir) -> None:
    rows = batches(1, 10_000)
    rows[7777] = batches(7778, 7778, reward=99.0)[0]
    write(run, rows)
    with indexed(run) as index:
        series = index.series("batch", ["rollout/raw_reward"], x="version", most=500)
    assert (len(series.x), series.rows) == (500, 10_000)
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
        assert (index.series(WINDOW, [name]).values[name], index.rate(WINDOW, name)) == ([300.0] * 5, 10.0)


def test_no_metrics_and_lines_that_are_no_rows_are_no_tables(run: RunDir) -> None:
    with open_index(run) as index:
        assert not index.read_rows()
        assert (index.tables(), index.progress().total, index.series("batch", ["rollout/raw_reward"]).x) == ([], 0, [])
    write(run, batches(1, 1))
    with (run.metrics / CURRENT).open("ab") as file:
        file.write(b"\xff\xfe\n{}\n[1]\n" + b'{"time_s":1,"kind":"../../x","of":"","version":"0.1","step":1,"rollout/raw_reward":1}\n')
        file.write(b'{"time_s":1,"kind":"window","of":"../../x","version":"0.1","step":1,"rollout/raw_reward":1}\n')
        file.write(b'{"time_s":1,"kind":"window","of":"","version":"x","step":1,"rollout/raw_reward":1}\n')
    before = set(Path(run.path).iterdir())
    with indexed(run) as index:
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
    for name, value in (("_IDLE_S", 0.05), ("_COMMIT_S", 0.02), ("_LOOK_BACK", 2)):
        monkeypatch.setattr(f"streamrl.page.log.{name}", value)
    bus = MemoryBus("demo")
    breach = Finding(objective="starvation", level=Level.BREACH, value=0.9, bound=0.5, causes=(Cause("few_producers", "why", "turn"),))
    await judge(bus, breach)
    for number in range(1, 4):
        await say(bus, f"note {number}")
        await train(bus, number)
    for earlier in (["note 1", "note 2", "note 3"], ["note 3", "note 4"]):  # the second one finds the index of the first, and looks back
        async with followed(run, bus) as (log, index):
            assert ([note.text for note in log.notes], log.findings) == (earlier, (breach,))
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


def test_rows_are_there_once_they_are_committed_and_columns_that_come_late_have_holes(tmp_path: Path) -> None:
    tables = Tables(tmp_path / "t")
    tables.add("batch", {"version": 1.0, "a/b": 0.5})
    assert tables.rows("batch") == 0
    assert tables.commit({"file": 10})
    tables.add("batch", {"version": 2.0})
    tables.add("batch", {"version": 3.0, "c": 7.0})
    tables.commit({"file": 20})
    assert not tables.commit({"file": 20})
    for one in (tables, Tables(tmp_path / "t")):
        assert one.column("batch", "version").tolist() == [1, 2, 3]
        assert as_json(one.column("batch", "a/b").tolist()) == [0.5, None, None]
        assert as_json(one.column("batch", "c").tolist()) == [None, None, 7.0]
        assert as_json(one.column("batch", "nobody").tolist()) == [None] * 3
        assert (one.mark("file"), one.names(), one.columns("batch")) == (20, ["batch"], ["a/b", "c", "version"])


def test_what_a_crash_left_behind_the_rows_that_count_is_cut(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    tables.add("batch", {"version": 1.0})
    tables.commit({"file": 1})
    path = tmp_path / "batch" / "version"
    path.write_bytes(path.read_bytes() + np.array([8.0, 9.0]).tobytes() + b"torn")
    tables = Tables(tmp_path)
    tables.add("batch", {"other": 5.0})
    tables.commit({"file": 2})
    assert as_json(tables.column("batch", "version").tolist()) == [1.0, None]


def test_a_fork_takes_the_place_of_what_was_before(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    for number in range(1, 6):
        tables.add("batch", {"version": float(number), "x": float(number)})
    tables.commit({})
    tables.add("batch", {"version": 6.0})
    for least in (6.0, 4.0):
        tables.drop_from("batch", "version", least)
    tables.add("batch", {"version": 4.0})
    tables.commit({})
    assert tables.column("batch", "version").tolist() == [1, 2, 3, 4]
    assert as_json(tables.column("batch", "x").tolist()) == [1, 2, 3, None]


@pytest.mark.parametrize("content", [b"", b"{", b'{"format":99}', b'{"rows":{"../x":3}}', b"\xff"])
def test_a_state_that_cannot_be_read_begins_anew(tmp_path: Path, content: bytes) -> None:
    tables = Tables(tmp_path)
    tables.add("batch", {"version": 1.0})
    tables.commit({"file": 1})
    (tmp_path / "state.json").write_bytes(content)
    tables = Tables(tmp_path)
    assert (tables.names(), tables.mark("file")) == ([], 0)
    tables.add("batch", {"version": 7.0})
    tables.commit({})
    assert tables.column("batch", "version").tolist() == [7.0]


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    for name in ("../x", "a/b", "", ".x", "x" * 300):
        with pytest.raises(ValueError, match="no name"):
            Tables(tmp_path).add(name, {})


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=300), st.integers(2, 60))
def test_thinning_keeps_the_extremes_and_never_more_points_than_asked_for(values: list[float], most: int) -> None:
    x, column = np.arange(len(values), dtype=np.float64), np.array(values)
    places, (thin,) = shrink(x, [column], most)
    assert len(places) == len(thin) <= max(most, 2)
    assert (np.diff(places) >= 0).all()
    assert set(thin[~np.isnan(thin)]) <= set(values)
    if not np.isnan(column).all():
        assert (np.nanmin(thin), np.nanmax(thin)) == (np.nanmin(column), np.nanmax(column))


def test_shares_that_add_up_to_one_still_do_when_thinned_and_what_is_missing_is_in_no_mean() -> None:
    first = np.linspace(0.0, 1.0, 1000)
    first[100:120] = math.nan
    second = 1.0 - first
    places, (a, b, none) = shrink_to_means(np.arange(1000.0), [first, second, np.full(1000, math.nan)], 37)
    assert (len(places), places[-1]) == (37, 999)
    np.testing.assert_allclose(a + b, 1.0)
    assert np.isnan(none).all()
    assert a[0] < a[-1]
    x, (same,) = shrink_to_means(np.arange(3.0), [np.array([1.0, math.nan, 3.0])], 3)
    assert (x.tolist(), as_json(same.tolist())) == ([0, 1, 2], [1, None, 3])


COUNTS = {"lengths/finished": histogram([1, 2, 2, 40]), "lengths/trained": histogram([1, 2, 2]), "lengths/dropped": histogram([40])}


def test_bars_of_all_kinds_have_the_same_bounds_and_every_length_is_in_one(run: RunDir) -> None:
    write_state(run, RunState(state="running", lengths=COUNTS, length_distance=0.25, length_cut=True))
    told = lengths_of(read_state(run))
    bounds = told["bounds"]
    assert (bounds[0], bounds[-1][0] <= 40 <= bounds[-1][1]) == ((1, 1), True)
    assert [beyond[0] - one[1] for one, beyond in pairwise(bounds)] == [1] * (len(bounds) - 1)
    lines = [(one["name"], one["number"], sum(one["shares"])) for one in told["lines"]]
    assert lines == [("finished", 4, 1.0), ("cut", 0, 0.0), ("trained", 3, 1.0), ("dropped", 1, 1.0)]
    assert told["lines"][2]["shares"][:2] == pytest.approx([1 / 3, 2 / 3])
    assert told["lines"][1]["p50"] is None
    assert told["said"] == "distance 0.25 of the lengths trained from those trained, dropped or cut"


def test_the_longest_answers_fit_the_bars_too() -> None:
    told = lengths_of(RunState(state="running", lengths={"lengths/cut": histogram([0, 1 << 40])}))
    assert len(told["bounds"]) <= MOST_BARS
    assert [share for share in told["lines"][1]["shares"] if share] == [0.5, 0.5]
    assert told["said"].startswith("too few answers")


@pytest.mark.parametrize("lengths", [None, {}, {"lengths/trained": ()}, {"lengths/trained": (0, 0)}, {"lengths/trained": (-1,), "x": (1,)}])
def test_where_nothing_is_known_nothing_is_drawn(lengths: dict[str, tuple[int, ...]] | None) -> None:
    state = None if lengths is None else RunState(state="running", lengths=lengths)
    assert lengths_of(state) == {"bounds": [], "lines": [], "said": ""}


OFF = dict.fromkeys(("stream_lag_s", "drop_rate", "logprob_float32", "logprob_bfloat16", "logprob_growth"), 0.0)
BOUNDS = SloConfig(p95_age=4, starvation=0.5, no_progress_s=60, **OFF)


def test_objectives_have_lines_once_judged_and_the_worst_of_a_run_that_is_over(run: RunDir) -> None:
    breach = Finding(objective="starvation", level=Level.BREACH, value=0.9, bound=0.5, causes=(Cause("few_producers", "why", "turn this"),))
    told = objectives_of(BOUNDS, (breach,), {"staleness/p95": 1.5, "starvation/trainer": 0.7})
    assert told["level"] == "breach"
    lines = [(one["objective"], one["level"], one["value"]) for one in told["lines"]]
    assert lines == [("p95_age", "ok", 1.5), ("starvation", "breach", 0.9), ("no_progress_s", "ok", None)]
    assert told["lines"][1]["causes"] == [{"what": "why", "hint": "turn this"}]
    told = objectives_of(BOUNDS, None, {})
    assert told["level"] is None
    assert {one["level"] for one in told["lines"]} == {None}
    assert objectives_of(BOUNDS, (), {})["level"] == "ok"
    run.summary_path.write_bytes(b'{"steps":3,"slo":{"starvation":"warn","stream_lag_s":"breach"}}')
    assert worst_over(run, BOUNDS) == {"p95_age": "ok", "starvation": "warn", "no_progress_s": "ok"}


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"slo":3}', b'{"slo":{"p95_age":"bad"}}', b"\xff"])
def test_of_a_run_that_is_over_only_a_summary_that_can_be_read_says_something(run: RunDir, content: bytes | None) -> None:
    if content is not None:
        run.summary_path.write_bytes(content)
    assert worst_over(run, BOUNDS) == {}
