from __future__ import annotations

import pytest
from msgspec.structs import replace

from streamrl.core.lengths import distance, histogram
from streamrl.monitor.lengths import FEWEST, MOST_DECIDED, Lengths, distance_text, side_by_side
from streamrl.monitor.series import Series
from streamrl.monitor.view import RunView
from streamrl.schemas.events import MetricReport
from streamrl.telemetry.metrics import report
from tests.monitor.conftest import MakeEntry, as_line

SHORT, LONG = histogram([10] * 100), histogram([200] * 100)


def test_answers_make_a_distance_where_there_are_enough_known_ones() -> None:
    lengths = Lengths()
    lengths.add({"lengths/trained": SHORT})
    assert lengths.distance == 0.0
    lengths.add({"lengths/dropped": LONG})
    lengths.add({"lengths/cut": LONG, "lengths/finished": LONG})
    assert lengths.distance == pytest.approx(2 / 3)
    assert lengths.values["lengths/cut_p50"] == pytest.approx(200, rel=0.19)
    lengths = Lengths()
    lengths.add({"lengths/trained": histogram([1] * (FEWEST - 1)), "lengths/dropped": LONG})
    assert lengths.distance is None and "lengths/distance" not in lengths.values
    assert Lengths().values == {}
    lengths = Lengths()
    lengths.add({"lengths/trained": [1, -1], "lengths/other": [1], "lengths/cut": [1] * 100_000})
    assert lengths.counts == {}


def test_the_newest_answers_weigh_most_and_memory_is_bounded() -> None:
    lengths = Lengths()
    for _ in range(1000):
        lengths.add({"lengths/trained": SHORT, "lengths/dropped": LONG})
    assert lengths.distance == pytest.approx(0.5, abs=0.01)
    for _ in range(1000):
        lengths.add({"lengths/trained": LONG})
    assert lengths.distance is not None and lengths.distance < 0.01
    assert sum(map(sum, lengths.counts.values())) <= 2 * MOST_DECIDED


def test_cut_answers_are_compared_with_those_of_their_time() -> None:
    lengths = Lengths()
    lengths.add({"lengths/cut": histogram([200] * 2000)})
    for _ in range(1000):
        lengths.add({"lengths/trained": SHORT}, live=False)
    assert (lengths.distance, lengths.knows_cut) == (0.0, False) and "lengths/distance" not in lengths.values
    assert sum(lengths.counts["lengths/cut"]) == 2000
    for _ in range(20):
        lengths.add({"lengths/trained": SHORT})
    assert lengths.knows_cut and lengths.values["lengths/distance"] == pytest.approx(0.5)
    lengths.forget_ledger()
    lengths.add({"lengths/trained": SHORT}, live=False)
    assert (lengths.distance, lengths.knows_cut) == (0.0, False)
    assert sum(lengths.counts["lengths/cut"]) == 2000


def test_of_history_no_cut_answer_is_spoken_of(entry: MakeEntry) -> None:
    view = RunView("demo")
    texts: list[str] = []
    for live in (False, True):
        view.live = live
        view.ledger(as_line(replace(entry(1 + live), histograms={"lengths/trained": SHORT})))
        numbers = view.numbers(elapsed_s=1.0)
        texts.append(distance_text(numbers.length_distance, cut=numbers.length_cut))
    assert [text.partition("from those ")[2] for text in texts] == ["trained or dropped", "trained, dropped or cut"]


def test_rows_have_quantiles_of_the_batch_and_of_the_window(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=10.0))
    view.take_rows(1000.0)
    lengths = {"lengths/trained": SHORT, "lengths/dropped": LONG}
    view.ledger(as_line(replace(entry(1), histograms=lengths)))
    view.metric(report("engine-0", {"tokens/cut_total": 9.0}, time_s=0.0, histograms={"lengths/cut": LONG}))
    batch, *rows = view.take_rows(1010.0)
    assert batch.values["lengths/trained_p95"] == pytest.approx(10, rel=0.19) and "lengths/cut_p50" not in batch.values
    (of_run,) = [row for row in rows if row.of == ""]
    assert of_run.values["lengths/distance"] == pytest.approx(2 / 3) and of_run.values["lengths/cut_p50"] > 150
    assert view.numbers(elapsed_s=1.0).length_distance == pytest.approx(2 / 3)


def test_a_ledger_that_is_read_anew_counts_once(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.metric(MetricReport(worker="p", histograms={"lengths/cut": LONG}))
    for _ in range(2):
        view.ledger(as_line(replace(entry(1), histograms={"lengths/trained": SHORT})))
        view.forget_ledger()
    assert view.lengths.counts == {"lengths/cut": LONG}


def test_stretches_side_by_side_are_of_the_same_lengths() -> None:
    least, counts = side_by_side({"a": histogram([10, 11, 3000]), "b": histogram([90])}, 8)
    assert least[0] <= 10 and least[-1] > 3000 and {len(one) for one in counts.values()} == {len(least) - 1} and len(least) <= 9
    assert (sum(counts["a"]), counts["a"][0], sum(counts["b"])) == (3, 2, 1)
    assert side_by_side({}, 8)[1] == {} and distance(SHORT, LONG) == 1.0
