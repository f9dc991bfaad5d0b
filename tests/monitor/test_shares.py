"""Numbers of one version: shares of time, goodput and lengths."""

import itertools

import pytest
from msgspec.structs import replace

from streamrl.core.lengths import distance, histogram
from streamrl.monitor.goodput import Backlog
from streamrl.monitor.lengths import FEWEST, MOST_DECIDED, Lengths, distance_text, side_by_side
from streamrl.monitor.series import RUN, Series
from streamrl.monitor.shares import FORGOTTEN_AFTER_S, named
from streamrl.monitor.view import RunView
from streamrl.schemas.control import EVALUATION_ROLE, ROLLOUT_ROLE, EnginePresence
from streamrl.schemas.events import MetricReport
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report
from streamrl.telemetry.states import STATES
from tests.monitor.conftest import MakeEntry, as_line

START_S = 10_000.0


class Reader:
    """Feeds a series second by second, and keeps the window rows."""

    def __init__(self) -> None:
        self.series = Series(window_s=10.0)
        self.now_s = START_S
        self.series.due(self.now_s)
        self.rows: list[dict[str, dict[str, float]]] = []

    def hear(self, worker: str, values: dict[str, float], *, time_s: float | None = None, left: bool = False) -> None:
        self.series.report(report(worker, values, time_s=self.now_s if time_s is None else time_s, left=left))

    def go(self, to_s: float) -> None:
        self.now_s = to_s
        if self.series.due(to_s):
            self.series.close(to_s, {}, step=0)
            self.rows.append({row.of: row.values for row in self.series.take()})


def trainer(**states: float) -> dict[str, float]:
    return {f"trainer/{state}_s": amount for state, amount in states.items()}


def total(values: dict[str, float], kind: str) -> float:
    return sum(amount for name, amount in values.items() if name.startswith(f"{kind}/share/"))


def down(values: dict[str, float], kind: str = "trainer") -> float:
    return values[f"{kind}/share/down"]


def test_shares_of_a_window_are_its_seconds_over_their_sum() -> None:
    reader = Reader()
    for second in range(2, 12, 2):
        reader.go(START_S + second)
        reader.hear("trainer-0", trainer(compute=0.5, wait_samples=1.5))
        reader.hear("engine-0", {"engine/decode_s": 1.0, "engine/idle_s": 1.0, "engine/saturated_s": 0.5})
        reader.hear("engine-1", {"engine/decode_s": 2.0})
    reader.go(START_S + 20)
    values = reader.rows[-1]["trainer-0"] if len(reader.rows) > 1 else reader.rows[0]["trainer-0"]
    assert (values["trainer/share/compute"], values["trainer/share/wait_samples"], values["trainer/share/publish"]) == (0.25, 0.75, 0.0)
    run = reader.rows[0][""]
    assert run["starvation/trainer"] == 0.75
    assert (run["starvation/engines_idle"], run["starvation/engines_saturated"]) == (0.25, 0.125)
    assert reader.rows[0]["engine-1"]["starvation/engines_idle"] == 0.0
    assert "starvation/producers" not in run


def test_a_worker_that_was_killed_is_down_until_its_successor_begins() -> None:
    """Killed at second 13, last heard at 12; a new process from 33 on, which says so at 35 and 37 and ..."""
    reader = Reader()
    for second in range(1, 61):
        reader.go(START_S + second)
        if second % 2 == 0 and second <= 12:
            reader.hear("trainer-0", trainer(compute=2.0))
        if second % 2 and second >= 35:
            reader.hear("trainer-0", trainer(setup=2.0))
        reader.hear("engine-0", {"engine/decode_s": 1.0})
    rows = [row["trainer-0"] for row in reader.rows]
    assert [down(values) for values in rows] == pytest.approx([0.0, 0.8, 1.0, 0.3, 0.0, 0.0], abs=0.15)
    assert [total(values, "trainer") for values in rows] == pytest.approx([1.0] * 6)
    assert sum(values.get("trainer/down_s", 0.0) for values in rows) == pytest.approx(21.0), "from its last word to its successor's start"
    assert sum(values.get(name, 0.0) for values in rows for name in named("trainer")) == pytest.approx(59.0)


def test_a_short_or_late_report_counts_no_second_twice() -> None:
    reader = Reader()
    for second, values in ((2, trainer(compute=2.0)), (4, trainer(compute=2.0)), (8, trainer(setup=1.0)), (10, trainer(compute=2.0))):
        reader.go(START_S + second)
        if second == 10:
            break
        reader.hear("trainer-0", values)
    assert reader.rows[0]["trainer-0"]["trainer/down_s"] == pytest.approx(3.0)
    reader = Reader()
    for second in range(1, 31):
        reader.go(START_S + second)
        reader.hear("engine-0", {"engine/decode_s": 1.0})
        if second in (1, 2, 3):
            reader.hear("trainer-0", trainer(compute=1.0))
        if second == 25:
            reader.hear("trainer-0", trainer(compute=22.0))
    spent = sum(row["trainer-0"].get(name, 0.0) for row in reader.rows for name in named("trainer"))
    assert spent == pytest.approx(25.0 + 5.0 - 5.0, abs=0.2)
    assert [total(row["trainer-0"], "trainer") for row in reader.rows] == pytest.approx([1.0] * 3)


def test_a_reader_that_is_cut_off_calls_nobody_down() -> None:
    reader = Reader()
    for second in range(1, 6):
        reader.go(START_S + second)
        reader.hear("trainer-0", trainer(compute=1.0))
    for second in range(6, 31):
        reader.go(START_S + second)
    assert all("trainer-0" not in row for row in reader.rows[1:])
    reader.hear("trainer-0", trainer(wait_bus=25.0))
    reader.go(START_S + 40)
    assert reader.rows[-1]["trainer-0"]["trainer/share/wait_bus"] == 1.0


def test_one_that_has_left_is_forgotten_and_not_down() -> None:
    reader = Reader()
    reader.go(START_S + 1)
    reader.hear("producer-3", {"producer/slot_generate_s": 8.0, "producer/slots": 8.0})
    for second in itertools.count(2, 2):
        reader.go(START_S + second)
        reader.hear("engine-0", {"engine/decode_s": 2.0})
        if second > FORGOTTEN_AFTER_S + 40:
            break
    assert "producer-3" not in reader.rows[-1] and "producer-3" in reader.rows[5]
    assert reader.rows[5]["producer-3"]["producer/slot_down_s"] == pytest.approx(80.0), "of all its slots"
    reader = Reader()
    for second in range(2, 62, 2):
        reader.go(START_S + second)
        reader.hear("engine-0", {"engine/decode_s": 2.0})
        if second in (2, 4, 52, 54):
            reader.hear("engine-1", {"engine/decode_s": 2.0}, left=second == 4)
    assert "engine-1" in reader.rows[0] and "engine-1" in reader.rows[-1]
    assert all("engine-1" not in row for row in reader.rows[1:4])
    assert [down(row[""], "engine") for row in reader.rows[:5]] == [0.0] * 5


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_makes_no_time(step_s: float) -> None:
    reader = Reader()
    for second in range(1, 41):
        reader.go(START_S + second)
        reader.hear("trainer-0", trainer(compute=1.0), time_s=reader.now_s + (step_s if second > 15 else 0.0))
    for row in reader.rows:
        spent = sum(row["trainer-0"].get(name, 0.0) for name in named("trainer"))
        assert 8.0 <= spent <= 18.0
        assert row["trainer-0"]["trainer/share/compute"] > 0.5


def test_shares_are_of_all_states_and_a_ledger_that_is_read_anew_counts_once(entry: MakeEntry) -> None:
    reader = Reader()
    reader.hear("producer-0", {"producer/slot_wait_credit_s": 4.0, "producer/slots": 2.0})
    reader.go(START_S + 10)
    found = {name.rpartition("/")[2] for name in reader.rows[0][""] if name.startswith("producer/share/")}
    assert found == {*STATES["producer"], "down"}
    assert reader.rows[0][""]["starvation/producers"] == 1.0
    view = RunView("demo")
    view.metric(MetricReport(worker="p", histograms={"lengths/cut": LONG}))
    for _ in range(2):
        view.ledger(as_line(replace(entry(1), histograms={"lengths/trained": SHORT})))
        view.forget_ledger()
    assert view.lengths.counts == {"lengths/cut": LONG}


def engine(name: str, tokens: int, role: str = ROLLOUT_ROLE) -> EnginePresence:
    return EnginePresence(engine=name, address="", serving=Version(0, 1), tokens_total=tokens, role=role)


def test_what_is_sampled_is_open_until_said_and_unknown_to_who_joins() -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)

    def still_open(now_s: float) -> float:
        (row,) = [row for row in view.take_rows(now_s) if row.of == RUN]
        return row.values["tokens/open"]

    view.engine("engine-0-aa", engine("engine-0-aa", 100))
    view.engine("engine-1-bb", engine("engine-1-bb", 70, EVALUATION_ROLE))
    assert still_open(1.0) == 100.0
    ended = {"tokens/published_total": 28.0, "tokens/greedy_total": 12.0, "tokens/cut_total": 10.0}
    view.metric(report("producer-0", ended, time_s=0.0))
    view.metric(report("engine-0", {"tokens/cut_total": 5.0, "tokens/sampled_total": 20.0}, time_s=0.0))
    view.metric(report("evaluator-0", {"tokens/evaluated_total": 15.0}, time_s=0.0))
    assert still_open(2.0) == 50.0
    view.engine("engine-0-cc", engine("engine-0-cc", 7))
    assert still_open(3.0) == 57.0, "an engine that was started anew counts from 0"
    view = RunView("demo", series=Series(window_s=1.0), joined=True)
    view.take_rows(0.0)
    view.metric(report("producer-0", {"tokens/published_total": 40.0}, time_s=0.0))
    assert all("tokens/open" not in row.values for row in view.take_rows(1.0))


def test_tokens_on_the_stream_are_those_that_wait_and_those_behind_the_cursor(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)
    assert view.numbers(elapsed_s=1.0).stream_tokens is None
    for number, stored in ((1, 300.0), (2, 500.0)):
        metrics = {"tokens/stored_total": stored, "tokens/waiting": 70.0}
        view.ledger(as_line(replace(entry(number, cursor=10 * number), metrics=metrics)))
    view.stream(last=20, num_bytes=1)
    assert view.numbers(elapsed_s=1.0).stream_tokens == 70.0
    view.stream(last=25, num_bytes=1)
    (row,) = [row for row in view.take_rows(1.0) if row.kind == "window"]
    assert row.values["lag/stream_tokens"] == 70.0 + 5 * 800.0 / 20


def test_a_backlog_goes_by_the_newest_fork_and_is_not_always_known() -> None:
    backlog = Backlog()
    for cursor, stored in ((10, 100.0), (20, 100.0), (30, 100.0), (20, 900.0)):
        backlog.ledger(cursor, {"tokens/stored_total": stored, "tokens/waiting": 0.0})
    assert (backlog.tokens(21), backlog.tokens(3)) == (pytest.approx(1000.0 / 20), 0.0)
    backlog = Backlog()
    for cursor, stored in ((10, 500.0), (10, 0.0)):
        backlog.ledger(cursor, {"tokens/stored_total": stored, "tokens/waiting": 0.0})
    assert backlog.tokens(20) == 500.0
    backlog = Backlog()
    backlog.ledger(10, {})
    assert backlog.tokens(20) is None


SHORT, LONG = histogram([10] * 100), histogram([200] * 100)


def test_answers_make_a_distance_where_there_are_enough_known_ones() -> None:
    lengths = Lengths()
    lengths.add({"lengths/trained": SHORT})
    assert lengths.distance == 0.0
    lengths.add({"lengths/dropped": LONG})
    lengths.add({"lengths/cut": LONG, "lengths/finished": LONG})
    assert (lengths.distance, lengths.values["lengths/cut_p50"]) == (pytest.approx(2 / 3), pytest.approx(200, rel=0.19))
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
    assert (lengths.distance, lengths.knows_cut, sum(lengths.counts["lengths/cut"])) == (0.0, False, 2000)


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


def test_stretches_side_by_side_are_of_the_same_lengths() -> None:
    least, counts = side_by_side({"a": histogram([10, 11, 3000]), "b": histogram([90])}, 8)
    assert least[0] <= 10 and least[-1] > 3000 and {len(one) for one in counts.values()} == {len(least) - 1} and len(least) <= 9
    assert (sum(counts["a"]), counts["a"][0], sum(counts["b"])) == (3, 2, 1)
    assert side_by_side({}, 8)[1] == {} and distance(SHORT, LONG) == 1.0
