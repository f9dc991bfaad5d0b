"""What the page shows of numbers: tables, lengths and objectives."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.slo import SloConfig
from streamrl.core.lengths import histogram
from streamrl.monitor.numbers import Cause, Finding, Level
from streamrl.monitor.run_state import RunState, read_state, write_state
from streamrl.page.lengths import MOST_BARS, lengths_of
from streamrl.page.objectives import objectives_of, worst_over
from streamrl.page.tables import Tables, as_json, shrink, shrink_to_means
from streamrl.runtime.rundir import RunDir


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
    assert len(places) == 37
    assert places[-1] == 999
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
    assert [(one["name"], one["number"], sum(one["shares"])) for one in told["lines"]] == [
        ("finished", 4, 1.0),
        ("cut", 0, 0.0),
        ("trained", 3, 1.0),
        ("dropped", 1, 1.0),
    ]
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


BOUNDS = SloConfig(p95_age=4, stream_lag_s=0, starvation=0.5, drop_rate=0, no_progress_s=60)


def test_objectives_have_lines_once_judged_and_the_worst_of_a_run_that_is_over(run: RunDir) -> None:
    breach = Finding(objective="starvation", level=Level.BREACH, value=0.9, bound=0.5, causes=(Cause("few_producers", "why", "turn this"),))
    told = objectives_of(BOUNDS, (breach,), {"staleness/p95": 1.5, "starvation/trainer": 0.7})
    assert told["level"] == "breach"
    assert [(one["objective"], one["level"], one["value"]) for one in told["lines"]] == [
        ("p95_age", "ok", 1.5),
        ("starvation", "breach", 0.9),
        ("no_progress_s", "ok", None),
    ]
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
