"""Only a run whose first rollouts earn almost nothing says so, and only once."""

from __future__ import annotations

import pytest

from streamrl.monitor.low_reward import LEAST, LowReward
from streamrl.monitor.numbers import Point
from streamrl.schemas.control import Untrained

PER_BATCH = 100


def batch(number: int, reward: float | None, *, num_batches: int = 1) -> Point:
    times = {"number": number, "time_s": float(number), "num_batches": num_batches, "num_tokens": 1}
    return Point(**times, reward=reward, warmup=False, warm=False, age_min=0, age_mean=0.0, age_max=0)


@pytest.mark.parametrize(
    ("batches", "untrained", "said"),
    [
        ([], Untrained(rewarded=LEAST, reward=0.0), True),
        ([], Untrained(rewarded=LEAST - 1, reward=0.0), False),
        ([batch(n, 0.015) for n in range(1, 6)], Untrained(), True),
        ([batch(1, 0.01, num_batches=4)], Untrained(rewarded=100, reward=0.0), True),
        ([batch(n, 0.03) for n in range(1, 6)], Untrained(), False),
        ([batch(1, 0.01)], Untrained(rewarded=900, reward=0.04), False),
        # Right half of the time, with rewards of 1 and -1: no batch is that near to nothing.
        ([batch(n, 0.2 * (-1) ** n) for n in range(1, 7)], Untrained(), False),
        ([batch(n, -0.01) for n in range(1, 7)], Untrained(), False),
        ([batch(n, None) for n in range(1, 9)], Untrained(), False),
    ],
)
def test_it_is_said_where_the_first_rollouts_earn_almost_nothing(batches: list[Point], untrained: Untrained, said: bool) -> None:
    low = LowReward("sums", PER_BATCH)
    assert bool(low.look(batches, untrained)) == said
    assert low.look(batches, untrained) == "", "once"


def test_a_run_that_earned_at_first_is_never_told() -> None:
    low = LowReward("sums", PER_BATCH)
    assert low.look([batch(n, 0.5) for n in range(1, 6)], Untrained()) == ""
    assert low.look([batch(n, 0.0) for n in range(1, 60)], Untrained()) == ""
    assert "streamrl inspect sums 0" in LowReward("sums", PER_BATCH).look([], Untrained(rewarded=LEAST))
