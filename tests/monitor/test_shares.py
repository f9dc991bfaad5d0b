from __future__ import annotations

import itertools

import pytest

from streamrl.monitor.series import Series
from streamrl.monitor.shares import FORGOTTEN_AFTER_S, named
from streamrl.telemetry.metrics import report
from streamrl.telemetry.states import STATES

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


def test_shares_are_of_all_states_of_a_kind() -> None:
    reader = Reader()
    reader.hear("producer-0", {"producer/slot_wait_credit_s": 4.0, "producer/slots": 2.0})
    reader.go(START_S + 10)
    found = {name.rpartition("/")[2] for name in reader.rows[0][""] if name.startswith("producer/share/")}
    assert found == {*STATES["producer"], "down"}
    assert reader.rows[0][""]["starvation/producers"] == 1.0
