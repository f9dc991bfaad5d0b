from __future__ import annotations

from itertools import pairwise

import pytest

from streamrl.core.lengths import histogram
from streamrl.monitor.run_state import RunState, read_state, write_state
from streamrl.page.lengths import MOST_BARS, lengths_of
from streamrl.runtime.rundir import RunDir

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
