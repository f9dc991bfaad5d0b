"""The page's index of runs, its logs and its tables."""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.bus.memory.bus import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.config.metrics import SloConfig
from streamrl.core.lengths import histogram
from streamrl.data.characters import write_tokenizer
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import LaunchError, NotFound
from streamrl.monitor.metrics_file import CURRENT
from streamrl.monitor.numbers import Cause, Finding, Level
from streamrl.monitor.run_state import RunState, read_state, write_state
from streamrl.monitor.series import WINDOW, Row
from streamrl.monitor.slo import detail_of
from streamrl.page.attention import Attention
from streamrl.page.conversation import Marks, conversation, marks_of
from streamrl.page.index import LEDGER_TABLE, Index, open_index
from streamrl.page.lengths import MOST_BARS, lengths_of
from streamrl.page.log import RunLog
from streamrl.page.objectives import objectives_of, worst_over
from streamrl.page.samples import Samples
from streamrl.page.search import Ends, Found, Wanted, around, turns_of
from streamrl.page.tables import Tables, as_json, shrink, shrink_to_means
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import encode
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.events import NOTICE_EVENT, SLO_EVENT, Event
from streamrl.schemas.ledger import Drop, LedgerEntry, Used
from streamrl.schemas.samples import Sample, Status, TurnSpan, VersionSpan
from streamrl.schemas.subjects import SAMPLES, Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import TokenValues
from streamrl.trainers.token_weights import FOLDER, TokenWeights
from tests.page.conftest import batches, indexed, read, write
from tests.support.batches import train_batch
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
    assert (bounds[0], bounds[-1]) == ((1, 1), (39, None))
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


HOSTILE = "<script>alert(1)</script>"


def made(ids: Sequence[int], spans: Sequence[VersionSpan] = (), *, mask: Sequence[int] | None = None, **values: Any) -> Sample:
    """A sample whose sampled tokens are those of spans with a version, unless a mask says otherwise."""
    kind = {"run": "demo", "policy": "policy", "source": "main", "task": 1, "rollout": 0} | values
    sampled = np.array([span.version is not None for span in spans for _ in range(span.length)] if mask is None else mask, np.uint8)
    return Sample(**kind, tokens=np.array(ids, np.int32), loss_mask=sampled, logprobs=-0.5 * sampled.astype(np.float32), spans=tuple(spans))


def sample(tokenizer: Tokenizer, task: int, rollout: int, *, reward: float, answer: str, version: int) -> Sample:
    prompt, said = tokenizer.encode(f"<|user|>{task}+0<|end|><|assistant|>"), tokenizer.encode(answer + "<|end|>")
    spans = (VersionSpan(len(prompt), None), VersionSpan(len(said), Version(0, version)))
    kind = {"task": task, "rollout": rollout, "group_size": 2, "reward": reward}
    return made(prompt + said, spans, **kind, status=Status.TRUNCATED if rollout else Status.COMPLETED)


class ReadLog(RunLog):
    """A log that is there."""

    there: Bus

    async def bus(self) -> Bus:
        return self.there


@asynccontextmanager
async def samples(run: RunDir) -> AsyncGenerator[tuple[Samples, MemoryBus]]:
    """Five batches of two groups each, which task 100 + version was dropped before."""
    write_tokenizer(run.model_dir)
    tokenizer = load_tokenizer(run.model_dir)
    bus = MemoryBus("demo")
    config = run.load_config()

    async def group(task: int, version: int, reward: float) -> int:
        pair = [sample(tokenizer, task, at, reward=reward + at, answer=f"{task} is it" + "!" * at, version=version - 1) for at in range(2)]
        return (await bus.publish(SUBJECTS.samples("main"), encode_samples(pair))).sequence

    with open_index(run) as index:
        for version in range(1, 6):
            tasks = (10 * version, 10 * version + 1)
            stands = {task: await group(task, version, version / 10) for task in tasks}
            used = tuple(Used(task, (0, 1), (sequence, sequence)) for task, sequence in stands.items())
            lost = await group(100 + version, version, 0.0)
            drops = (Drop(lost, 100 + version, (0, 1), "stale"), Drop(0, 999, (), "expired"))
            entry = LedgerEntry(
                **{"run": "demo", "trainer": config.trainer.name, "source": "main", "cursor": lost, "granted": 0, "retired": 0},
                version=Version(0, version),
                used=used,
                drops=drops,
                metrics={"train/tis": 1.25, "rollout/raw_reward": 1.0},
            )
            stored = (await bus.publish(SUBJECTS.ledger(config.trainer.name), encode(entry))).sequence
            index.add(LEDGER_TABLE, {"version": version, "epoch": 0, "sequence": stored}, source="ledger", mark=stored, forks=True)
        index.commit()
        log = ReadLog(run, index, config.trainer.name, Attention())
        log.there = bus
        yield Samples(run, config, index, log), bus


async def found(some: Samples, wanted: Mapping[str, Any], *, upto: int | None = None, batches: int = 100, skip: int = 0) -> Found:
    return await some.search(msgspec.convert(wanted, Wanted, strict=False), upto=upto, batches=batches, skip=skip)


async def test_filters_go_over_several_batches_and_say_how_far_they_looked(run: RunDir) -> None:
    async with samples(run) as (some, _):
        every = await found(some, {})
        assert (every.batches, every.num_samples, len(every.samples), every.first, every.more) == (5, 30, 30, 1, None)
        assert [hit.line.batch for hit in every.samples[:6]] == ["0.5"] * 6
        two = await found(some, {"became": "trained"}, upto=4, batches=2)
        assert ({hit.line.batch for hit in two.samples}, two.first, two.more) == ({"0.4", "0.3"}, 3, 2)
        assert len((await found(some, {}, upto=two.more)).samples) == 12
        for wanted, count in (
            ({"became": "trained"}, 20),
            ({"became": "dropped"}, 10),
            ({"became": "stale"}, 10),
            ({"became": "expired"}, 0),
            ({"least_reward": "1.3"}, 6),
            ({"most_reward": "0.1"}, 7),
            ({"task": "31"}, 2),
            ({"task": "103", "status": "truncated"}, 1),
            ({"version": "0.2"}, 6),
            ({"least_tokens": "18"}, 10),
            ({"text": "31 IS it!"}, 1),
            ({"text": "31+0"}, 2),
            ({"text": "nobody said"}, 0),
        ):
            assert len((await found(some, wanted)).samples) == count, wanted
        assert (await found(some, {"text": "31 is it!"})).samples[0].text.startswith("<|user|>31+0")
        assert every.samples[0].text == "50 is it<|end|>"


@pytest.mark.parametrize(
    ("bound", "most"), [("MOST_HITS", 1), ("MOST_HITS", 4), ("MOST_HITS", 6), ("MOST_MESSAGES", 2), ("_SEARCH_S", 0.0)]
)
async def test_a_search_that_ends_in_a_batch_goes_on_there(run: RunDir, monkeypatch: pytest.MonkeyPatch, bound: str, most: float) -> None:
    monkeypatch.setattr(f"streamrl.page.samples.{bound}", most)
    async with samples(run) as (some, _):
        parts = [await found(some, {}, batches=1)]
        while parts[-1].more is not None:
            assert parts[-1].samples, "it goes on"
            parts.append(await found(some, {}, upto=parts[-1].more, skip=parts[-1].skip, batches=1))
        lines = [hit.line for part in parts for hit in part.samples]
        assert len({(line.task, line.rollout) for line in lines}) == len(lines) == 30
        assert (sum(part.batches for part in parts), sum(part.num_samples for part in parts)) == (5, 30)


async def test_messages_that_are_gone_are_counted_and_the_others_found(run: RunDir) -> None:
    async with samples(run) as (some, bus):
        await bus.trim(SAMPLES, through=4)
        every = await found(some, {})
        assert (len(every.samples), every.missing, every.batches) == (22, 4, 5)


async def test_a_group_has_its_conversations_and_the_weights_that_are_known(run: RunDir) -> None:
    async with samples(run) as (some, _):
        group = await some.group(3, 31)
        assert group.weights == {"train/tis": 1.25}
        parts = [(part["role"], part["text"]) for part in group.samples[1]["conversation"]]
        assert parts == [("user", "31+0"), ("assistant", "31 is it!<|end|>")]
        assert [one["became"] for one in group.samples] == ["trained"] * 2
        assert [one["became"] for one in (await some.group(3, 103)).samples] == ["stale"] * 2
        for task in (999, 1, 41):
            with pytest.raises(NotFound, match=str(task)):
                await some.group(3, task)
        assert [one["weights"] for one in group.samples] == [None] * 2
        masks = [one["mask"] for one in group.samples]
        trained = [{"prompt": [1] * one.index(1), "answer": [2] * sum(one), "task": 31, "rollout": n} for n, one in enumerate(masks)]
        batch = train_batch(trained, mu=-2.0, reward=1.0)
        weights = np.linspace(0.5, 1.5, batch.num_tokens)
        values = TokenValues(np.full(batch.num_tokens, -0.25), weights, -weights)
        file = TokenWeights(run.path / FOLDER, 1 << 20)
        file.put(Version(0, 3), batch, values)
        file.close()
        first = (await some.group(3, 31)).samples[0]
        assert first["weights"] == [pytest.approx(values.weights[n], abs=1e-4) if mask else None for n, mask in enumerate(first["mask"])]
        assert first["trainer_logprobs"][-1] == -0.25
        given = [-value for value in first["weights"] if value is not None]
        assert [one for one in first["advantages"] if one is not None] == given
        assert first["advantage"] == pytest.approx({"mean": np.mean(given), "min": min(given), "max": max(given)}, abs=1e-4)
        late = (await some.group(3, 103)).samples[0]
        assert (late["weights"], late["advantages"], late["advantage"]) == (None, None, None), "it was dropped"
        batch = await some.batch(3)
        assert (len(batch.samples), len(batch.drops), batch.missing) == (4, 2, 0)


def test_a_turn_has_the_versions_that_sampled_it() -> None:
    old, new = Version(0, 3), Version(0, 4)
    spans = [VersionSpan(length, version) for length, version in ((3, None), (2, old), (1, None), (1, old), (2, new))]
    said = made([0] * 9, spans, started_s=2.0, began_s=3.0, finished_s=9.0)
    two = (
        TurnSpan(start=3, length=2, asked_s=2.0, began_s=3.0, finished_s=4.0),
        TurnSpan(start=6, length=3, asked_s=7.0, finished_s=8.0),
        TurnSpan(start=9, length=0),
    )
    assert [msgspec.structs.astuple(turn) for turn in turns_of(said)] == [(2.0, 3.0, 9.0, "0.3", "0.4")]
    turns = [msgspec.structs.astuple(turn) for turn in turns_of(msgspec.structs.replace(said, turns=two))]
    assert turns == [(2.0, 3.0, 4.0, "0.3", "0.3"), (7.0, 0.0, 8.0, "0.3", "0.4")]
    assert turns_of(msgspec.structs.replace(said, finished_s=0.0)) == ()


@pytest.mark.parametrize("wanted", [{"least_reward": "x"}, {"task": "1.5"}, {"nobody": "1"}, {"text": "x" * 2000}])
def test_filters_that_say_nothing_are_refused(wanted: dict[str, str]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wanted, Wanted, strict=False)


def test_a_drop_of_a_whole_message_is_that_of_each_sample_in_it() -> None:
    kind = {"run": "r", "trainer": "t", "source": "main", "cursor": 9, "granted": 0, "retired": 0, "version": Version(0, 1)}
    entry = LedgerEntry(
        **kind, used=(Used(1, (0,), (5,)),), drops=(Drop(6, 2, (), "poison"), Drop(5, 1, (0,), "late"), Drop(7, 3, (1,), "mine"))
    )

    def one(task: int, rollout: int, trained: int = 1) -> Sample:
        return made([0, 0], mask=[0, trained], task=task, rollout=rollout)

    ends = Ends(entry)
    greedy = one(1, 0, trained=0)
    assert [ends.of(greedy, 5), Ends(entry, became="trained").of(greedy, 5), ends.of(one(2, 3, 0), 6)] == ["baseline", "", "poison"]
    assert [ends.of(one(1, 0), 5), ends.of(one(2, 3), 6), ends.of(one(3, 1), 7), ends.of(one(3, 0), 7)] == ["trained", "poison", "mine", ""]
    assert ends.sequences() == [5, 7, 6]
    assert (Ends(entry, became="other").sequences(), Ends(entry, became="trained").sequences()) == ([7], [5])


def test_what_stands_around_words_is_cut() -> None:
    text = "x" * 500 + HOSTILE + "y" * 500
    found = around(text, HOSTILE.upper())
    assert found == "…" + "x" * 80 + HOSTILE + "y" * 80 + "…"
    assert around("abc", "abc") == "abc"
    assert around("", "abc") is None


CHAT_ML = """{% for m in messages %}{% if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}{% else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def spoken(tokenizer: Tokenizer, *parts: tuple[str, str], timed: bool = False) -> Sample:
    """A sample of texts, each by the `model` or somebody else."""
    ids, spans, turns = list[int](), list[VersionSpan](), list[TurnSpan]()
    for who, text in parts:
        some = tokenizer.encode(text)
        if who == "model":
            at = 10.0 * len(ids)
            times: dict[str, Any] = {"asked_s": at, "began_s": at + 1, "finished_s": at + 2} if timed else {}
            turns.append(TurnSpan(start=len(ids), length=len(some), engine="engine-1", finish_reason="stop", **times))
        spans.append(VersionSpan(len(some), Version(0, 3) if who == "model" else None))
        ids += some
    return made(ids, spans, mask=[0] * len(ids), turns=tuple(turns) if timed else ())


def said(one: Sample, tokenizer: Tokenizer, marks: Marks | None = None) -> list[tuple[str, bool, str]]:
    found = conversation(one, tokenizer.decode, marks_of(tokenizer) if marks is None else marks)
    return [(message.role, message.sampled, message.text) for message in found]


def test_roles_texts_and_what_the_model_wrote_are_told_apart(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    prompt = tokenizer.apply_chat_template([*messages, {"role": "user", "content": "2+3"}])
    one = spoken(
        tokenizer,
        ("", prompt),
        ("model", "<call>2+3<|end|>"),
        ("", "<|tool|>5<|end|><|assistant|>"),
        ("model", "It is 5<|end|>"),
        timed=True,
    )
    assert said(one, tokenizer) == [
        ("system", False, "Add."),
        ("user", False, "1+1"),
        ("assistant", False, "2"),
        ("user", False, "2+3"),
        ("assistant", True, "<call>2+3<|end|>"),
        ("tool", False, "5"),
        ("assistant", True, "It is 5<|end|>"),
    ]
    found = conversation(one, tokenizer.decode, marks_of(tokenizer))
    assert sum(message.num_tokens for message in found) == len(one.tokens)
    assert [message.seconds for message in found if message.sampled] == [2.0, 2.0]
    assert found[5].seconds == one.turns[1].asked_s - one.turns[0].finished_s
    assert {message.engine for message in found if message.sampled} == {"engine-1"}


def test_headers_of_models_and_parts_that_nobody_sampled(tokenizer: Tokenizer) -> None:
    one = spoken(tokenizer, ("", "<|user|>hi<|end|><|assistant|>"), ("model", "<|tool|>all is well<|end|><|user|>thanks"))
    assert said(one, tokenizer) == [("user", False, "hi"), ("assistant", True, "<|tool|>all is well<|end|><|user|>thanks")]
    one = spoken(tokenizer, ("", "12"), ("model", "="), ("", "7"), ("model", "7"))
    parts = [("prompt", False, "12"), ("assistant", True, "="), ("environment", False, "7"), ("assistant", True, "7")]
    assert said(one, tokenizer, Marks({})) == parts
    assert marks_of(None) == Marks({})
    assert said(spoken(tokenizer), tokenizer) == []
    assert said(spoken(tokenizer, ("model", "x")), tokenizer) == [("assistant", True, "x")]


def test_tools_that_speak_as_users_are_tools(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(CHAT_ML)
    chat_ml = load_tokenizer(tmp_path)
    prompt = chat_ml.apply_chat_template([{"role": "user", "content": "2+3"}])
    answer = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    one = spoken(chat_ml, ("", prompt), ("model", "x<|im_end|>"), ("", answer), ("model", "5<|im_end|>"))
    assert [role for role, _, _ in said(one, chat_ml)] == ["user", "assistant", "tool", "assistant"]
    assert said(one, chat_ml)[2][2].startswith("5")


def test_turns_and_conversations_are_cut_where_they_end(tokenizer: Tokenizer) -> None:
    one = spoken(tokenizer, ("", "a"), ("model", "bc"))
    one = msgspec.structs.replace(one, turns=(TurnSpan(start=1, length=1), TurnSpan(start=2, length=1)))
    assert [text for _, _, text in said(one, tokenizer, Marks({}))] == ["a", "b", "c"]
    one = spoken(tokenizer, *[part for _ in range(40) for part in (("", "a" * 9_000), ("model", "b" * 30_000))])
    found = conversation(one, tokenizer.decode, Marks({}))
    assert max(len(message.text) for message in found) == 20_000
    assert sum(len(message.text) for message in found) < 230_000
