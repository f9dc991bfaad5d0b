"""`blob_missing`: a rollout that came ends all the same, once, and its group closes without it."""

from __future__ import annotations

import pytest

from streamrl.core.fold import BLOB_MISSING
from tests.support.records import Stream, config, tasks_of, view


def test_a_group_closes_without_what_is_lost_and_retires_when_nothing_is_left() -> None:
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.group(0, (0.0, 1.0, 0.5))
    assert tasks_of(stream.close()) == (0,) and stream.state.ready == 1
    stream.end(0, 1, group=3, reason=BLOB_MISSING)
    assert stream.dropped == [(2, 0, (1,), BLOB_MISSING, False)]
    batch = stream.train()
    assert sorted(batch.groups[0].rollouts) == [0, 2] and stream.state.ready == 0 and stream.state.is_retired(0)
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.group(0, (0.0, 1.0))
    stream.end(0, 0, reason=BLOB_MISSING)
    stream.end(0, 1, reason=BLOB_MISSING)
    assert stream.dropped == [(2, 0, (0,), BLOB_MISSING, False), (3, 0, (1,), BLOB_MISSING, True)]
    assert stream.close() is None and stream.state.is_retired(0) and stream.state.ready == 0 and not stream.state.pending
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.rollouts(0, view(0, reward=1.0), group=3)
    stream.end(0, 0, group=3, reason=BLOB_MISSING)
    stream.rollouts(0, view(1, reward=1.0), group=3)
    assert stream.close() is None
    stream.rollouts(0, view(2, reward=0.0), group=3)
    assert sorted(stream.train().groups[0].rollouts) == [1, 2]
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.end(0, 0, reason=BLOB_MISSING)
    stream.group(0, (0.0, 1.0))
    assert stream.dropped[-1][:4] == (2, 0, (0,), "duplicate") and sorted(stream.train().groups[0].rollouts) == [1]
    stream = Stream(config(batch=1, drop_zero_variance=True))
    stream.group(0, (0.0, 1.0, 1.0))
    stream.end(0, 0, group=3, reason=BLOB_MISSING)
    assert stream.dropped[-1][3] == "zero_variance" and stream.state.is_retired(0) and stream.state.ready == 0


def test_a_rollout_ends_once() -> None:
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.group(0, (0.0, 1.0))
    for _ in range(2):
        stream.end(0, 0, reason=BLOB_MISSING)
    assert [reason for *_, reason, _ in stream.dropped] == [BLOB_MISSING, "duplicate"]
    stream.reward(0, 0, 0.7)
    assert stream.dropped[-1][3] == "superseded_reward"
    stream.rollouts(0, view(0, reward=1.0))  # a second delivery
    assert stream.dropped[-1][3] == "duplicate"
    stream.train()
    stream.end(0, 1, reason=BLOB_MISSING)
    assert stream.dropped[-1][3] == "late"


@pytest.mark.parametrize("reason", ["failed", "lost", "blob missing"])
def test_no_other_reason_ends_a_rollout_that_came(reason: str) -> None:
    stream = Stream(config(batch=1, drop_zero_variance=False))
    stream.group(0, (0.0, 1.0))
    stream.end(0, 0, reason=reason)
    assert stream.dropped == [(2, 0, (0,), "duplicate", False)] and len(stream.train().groups[0].rollouts) == 2
