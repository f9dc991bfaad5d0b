import random
import threading
import time

import pytest

from streamrl.telemetry.clock import ClockReports, StateClock
from streamrl.telemetry.names import METRICS, Reduction
from streamrl.telemetry.states import STATES, seconds, share


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_slots_times_seconds_add_up_however_they_move() -> None:
    hand, dice = Hand(), random.Random(1)
    clock = StateClock("a", slots=5, now=hand)
    states = ["a"] * 5
    spent = dict.fromkeys("abc", 0.0)
    for _ in range(500):
        step_s = dice.random()
        hand.now_s += step_s
        for state in states:
            spent[state] += step_s
        slot, state = dice.randrange(5), dice.choice("abc")
        clock.move(states[slot], state)
        states[slot] = state
    found = clock.take()
    assert found == pytest.approx(spent)
    assert sum(found.values()) == pytest.approx(5 * (hand.now_s - 100.0))


def test_states_are_entered_and_read_by_several_threads() -> None:
    seen: list[float] = []

    def now() -> float:
        seen.append(time.monotonic())
        return seen[-1]

    clock = StateClock("a", slots=4, now=now)
    taken = 0.0

    def go() -> None:
        for _ in range(2000):
            clock.move("a", "b")
            clock.move("b", "a")

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += sum(clock.take().values())
    last = clock.take()
    assert last.keys() == {"a", "b"}
    assert taken + sum(last.values()) == pytest.approx(4 * (seen[-1] - seen[0]), rel=1e-6)


async def test_what_the_bus_does_not_take_is_reported_later() -> None:
    hand = Hand()
    clock = StateClock("setup", slots=3, now=hand)
    said: list[dict[str, float]] = []
    works = False

    async def put(values: object) -> bool:
        assert isinstance(values, dict)
        said.append(values)
        return works

    reports = ClockReports(clock, "producer", put)
    hand.now_s += 1.0
    await reports.report()
    works = True
    hand.now_s += 1.0
    await reports.report()
    hand.now_s += 1.0
    await reports.report()
    assert said == [{"producer/slot_setup_s": amount, "producer/slots": 3.0} for amount in (3.0, 6.0, 3.0)]


def test_seconds_go_to_the_state_that_was_entered_last() -> None:
    hand = Hand()
    clock = StateClock("setup", now=hand)
    hand.now_s += 2.0
    assert clock.enter("compute") == "setup"
    hand.now_s += 3.0
    with clock.within("wait_bus"):
        hand.now_s += 0.5
    hand.now_s += 1.0
    assert clock.take() == {"setup": 2.0, "compute": 4.0, "wait_bus": 0.5}
    hand.now_s += 7.0
    assert clock.take() == {"setup": 0.0, "compute": 7.0, "wait_bus": 0.0}
    clock = StateClock("compute")
    with pytest.raises(KeyError), clock.within("wait_bus"):
        raise KeyError
    assert clock.state == "compute"
    for kind, states in STATES.items():
        for state in (*states, "down"):
            assert METRICS[seconds(kind, state)].reduction is Reduction.SUM
            assert METRICS[share(kind, state)].unit == "fraction"
