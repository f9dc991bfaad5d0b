"""Several sets of problems as people see them."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.errors import SchemaError
from streamrl.monitor.decoded import evaluation_of
from streamrl.monitor.evaluations import MOST_SETS, Evaluations
from streamrl.monitor.numbers import Evaluation
from streamrl.monitor.screen import plain_line, reward_line
from streamrl.monitor.series import Series
from streamrl.monitor.sinks.position import Position
from streamrl.monitor.summary import summarize
from streamrl.monitor.view import RunView
from streamrl.schemas.events import Event
from streamrl.schemas.versions import Version


def told(name: str, number: int, accuracy: float | None, **more: Any) -> Event:
    detail = {"set": name, "version": f"0.{number}", "versions": [f"0.{number}"] * 2, "accuracy": accuracy, "num": 4, "problems": []}
    return Event(kind="evaluation", worker="evaluator-0", detail=detail | more, time_s=float(number))


SUMS = {
    "samples": 32,
    "answered": 30,
    "truncated": 3,
    "pass": {"1": {"value": 0.5, "low": 0.4, "high": 0.6, "problems": 4}, "8": {"value": 0.75, "low": 0.5, "high": 1.0, "problems": 4}},
    "majority": {"8": {"value": 0.6, "low": 0.5, "high": 1.0, "problems": 4}},
    "tokens": {"mean": 12.0, "p50": 11.0, "p95": 20.0, "sum": 384.0},
    "took_s": 2.0,
}


def view_of(*events: Event) -> RunView:
    view = RunView("run", steps=10)
    view.series = Series(evaluated=Position().has)
    for event in events:
        view.event(event)
    return view


def test_an_event_is_read_with_all_that_it_says() -> None:
    found = evaluation_of(told("sums", 3, 0.5, pinned=True, interval=[0.4, 0.6], **SUMS))
    assert (found.set, found.accuracy, found.interval, found.pinned) == ("sums", 0.5, (0.4, 0.6), True)
    assert (found.passes, found.majorities) == ({1: 0.5, 8: 0.75}, {8: 0.6})
    assert (found.truncated_ratio, found.failed_ratio, found.response_len, found.took_s) == (0.1, 2 / 32, 12.0, 2.0)


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "a\n"])
def test_a_set_of_another_name_is_no_evaluation(name: str) -> None:
    with pytest.raises(SchemaError):
        evaluation_of(told(name, 3, 0.5))


def test_the_first_set_is_that_of_the_held_out_rows() -> None:
    view = view_of(told("sums", 1, 0.25, **SUMS), told("heldout", 1, 0.5), told("sums", 2, None), told("words", 2, 0.125))
    numbers = view.numbers(elapsed_s=1.0)
    assert numbers.heldout == 0.5
    assert [(one.set, one.accuracy) for one in numbers.evaluations] == [("sums", None), ("words", 0.125)]
    assert "heldout=0.500 words=0.125" in plain_line(numbers)
    assert [part.text.strip() for part in reward_line(numbers)][-3:] == ["held-out 0.500", "sums -", "words 0.125"]
    found = summarize(view, wall_s=1.0)
    assert (found.heldout_first, found.heldout_last) == (0.5, 0.5)
    assert {name: (one.first, one.last) for name, one in found.evaluations.items()} == {
        "sums": (0.25, None),
        "heldout": (0.5, 0.5),
        "words": (0.125, 0.125),
    }


def test_every_set_has_its_rows() -> None:
    view = view_of(told("sums", 1, 0.25, **SUMS), told("words", 1, None))
    [row] = [row for row in view.take_rows(0.0) if row.kind == "evaluation"]
    assert row.values["eval/sums"] == 0.25
    assert row.values["eval/sums-pass@8"] == 0.75


def test_no_more_sets_are_kept_than_there_is_room_for() -> None:
    kept = Evaluations()
    for number in range(MOST_SETS + 5):
        one = Evaluation(version=Version(0, 1), accuracy=0.5, num=1, set=f"s{number}")
        assert kept.add(one, last_cold=-1) == (number < MOST_SETS)
    assert len(kept.sets) == MOST_SETS
