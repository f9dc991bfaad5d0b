"""Which part of the rollouts fails: when a run is given up for it, and when a producer alone is drained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from streamrl.core.failed_share import FailedShare, window_of
from streamrl.monitor.failed_share import Shares, failed_rollouts_line
from streamrl.monitor.view import RunView
from streamrl.schemas.events import MetricReport
from streamrl.schemas.ledger import Drop
from streamrl.schemas.samples import Tombstone
from tests.monitor.conftest import MakeEntry, as_line

NONE = (0, 0)


@pytest.mark.parametrize(("batch_tasks", "group_size", "window"), [(4, 4, 256), (16, 8, 256), (64, 16, 2048)])
def test_a_share_is_taken_over_two_batches_at_least(batch_tasks: int, group_size: int, window: int) -> None:
    assert window_of(batch_tasks, group_size) == window


def test_what_is_older_than_the_window_is_forgotten() -> None:
    share = FailedShare(100)
    share.add(failed=60, ended=60)
    assert not share.is_full
    share.add(failed=0, ended=40)
    assert share.is_full and share.exceeds(0.5)
    share.add(failed=0, ended=60)
    assert (share.failed, share.ended, share.exceeds(0.5)) == (0, 100, False)


@pytest.mark.parametrize(
    ("drops", "used", "untrained", "too_many"),
    [
        ({"failed": 93}, 7, NONE, True),
        ({"timeout": 40, "deliveries": 20}, 40, NONE, True),
        ({"failed": 50}, 50, NONE, False),
        ({"filtered": 93}, 7, NONE, False),
        ({"zero_variance": 80, "stale": 13}, 7, NONE, False),
        ({"too easy": 93}, 7, NONE, False),
        ({"failed": 40}, 2, NONE, False),
        # No batch is trained any more: each group has lost too many of its rollouts.
        ({}, 0, (90, 96), False),
        ({}, 0, (90, 100), True),
        ({}, 100, (90, 100), True),
        ({}, 0, (40, 100), False),
    ],
)
def test_failures_and_time_outs_count_and_no_filters_verdict(
    drops: Mapping[str, int], used: int, untrained: tuple[int, int], too_many: bool
) -> None:
    shares = Shares(100)
    shares.trained(used, Counter(drops))
    assert shares.too_many(0.5, untrained) is too_many
    assert not shares.too_many(1.0, untrained), "never"


def test_a_bad_producer_is_told_from_a_bad_run() -> None:
    shares = Shares(100)
    shares.told("producer-0", failed=100)
    shares.trained(5, Counter(failed=95))
    assert shares.bad_beside_good({"producer-0"}, 0.5, untrained=NONE) == set() and shares.too_many(0.5, NONE)
    assert shares.bad_beside_good({"producer-0", "slow"}, 0.5, untrained=NONE) == {"producer-0"}, "nothing is known of the other yet"
    shares.trained(5, Counter(failed=95))
    shares.told("producer-1", failed=80, stored=20)
    assert shares.bad_beside_good({"producer-0", "producer-1"}, 0.5, untrained=NONE) == set(), "both are bad"
    shares.told("producer-2", failed=2, stored=8)
    assert shares.bad_beside_good({"producer-0", "producer-1"}, 0.5, untrained=NONE) == set(), "the good one has left"
    assert shares.bad_beside_good({"producer-0", "producer-1", "producer-2"}, 0.5, untrained=NONE) == {"producer-0", "producer-1"}
    assert not shares.too_many(0.5, NONE), "what they have failed counts no more"
    shares.forget("producer-0")
    assert shares.too_many(0.5, (100, 100)) and not shares.all_bad({"producer-2"}, 0.5), "they have left, and a good one is there"
    assert shares.all_bad({"producer-1"}, 0.5)


@pytest.mark.parametrize(("failed", "drained"), [(30, set[str]()), (100, {"producer-0"})])
def test_a_producer_of_which_little_is_known_is_drained_only_in_place_of_the_run(failed: int, drained: set[str]) -> None:
    shares = Shares(100)
    shares.told("producer-0", failed=failed)
    shares.told("producer-1", stored=10)
    assert shares.bad_beside_good({"producer-0", "producer-1"}, 0.5, untrained=NONE) == drained
    shares.told("producer-0", failed=1)
    assert shares.bad_beside_good({"producer-0", "producer-1"}, 0.5, untrained=(90, 100)) == {"producer-0"}


def test_a_view_counts_what_happens_while_it_is_live(entry: MakeEntry) -> None:
    view = RunView("demo", shares=Shares(100))
    view.live = False
    view.ledger(as_line(entry(1, drops=[Drop(1, 7, (0, 1, 2), "failed")])))
    assert view.shares.run.ended == 0
    view.live = True
    view.ledger(as_line(entry(2, drops=[Drop(1, 8, (0, 1, 2), "failed"), Drop(1, 9, (0,), "filtered")])))
    assert (view.shares.run.failed, view.shares.run.ended) == (3, 6)
    stone = Tombstone(task=1, reason="failed", rollout=0, group_size=2, detail="ValueError: no in reward.py:3", source="main")
    view.tombstone(9, stone)
    view.tombstone(10, Tombstone(task=1, reason="timeout", rollout=None, group_size=2, detail="", source="main", producer="producer-3"))
    view.metric(MetricReport(worker="producer-3", sum={"producer/rollouts_total": 5.0}))
    view.metric(MetricReport(worker="trainer-0", sum={"producer/rollouts_total": 5.0}))
    assert (view.shares.of("producer-3").failed, view.shares.of("producer-3").ended) == (2, 7)
    numbers = view.numbers(elapsed_s=1.0)
    assert (numbers.failed_rollouts, numbers.ended_rollouts) == (3 + 3 + 3, 2 + 2 + 3 + 4 + 3)


@pytest.mark.parametrize(
    ("failed", "ended", "newest", "said"),
    [
        (
            7624,
            8224,
            "failed: ValueError: no in reward.py:3",
            "7,624 of 8,224 rollouts failed: ValueError: no in reward.py:3",
        ),
        (6, 100, "timeout: 30 s\nof\x1b user code", "6 of 100 rollouts failed: timeout: 30 s of\N{MIDDLE DOT} user code"),
        (6, 100, "", "6 of 100 rollouts failed"),
        (5, 100, "failed: x", ""),
        (0, 0, "", ""),
    ],
)
def test_how_many_failed_is_said_beyond_a_few_percent(failed: int, ended: int, newest: str, said: str) -> None:
    assert failed_rollouts_line(failed, ended, newest) == said
