"""The fold's policies for age: what is dropped, what is waited for, what goes first."""

from __future__ import annotations

from msgspec.structs import replace

from streamrl.schemas.versions import Version
from tests.support.records import Stream, config, tasks_of, view


def advance(s: Stream, versions: int, first_task: int) -> None:
    """Train `versions` batches of fresh tasks; batch_tasks must be 1."""
    for k in range(versions):
        s.group(first_task + k, oldest=s.state.version.number)
        s.train()


def test_drop_takes_a_group_that_arrives_stale_or_grew_so() -> None:
    s = Stream(config(1, 1))
    advance(s, 2, 1)
    s.group(0, oldest=0, newest=2)
    assert s.dropped == [(3, 0, (0, 1), "stale", True)]
    s.group(3, oldest=1)
    assert tasks_of(s.close()) == (3,)
    s = Stream(config(2, 1))
    for task in (0, 1, 2):
        s.group(task)
    s.train()
    assert list(s.state.pending) == [2] and s.state.drops == ()
    s.group(3, oldest=0)
    s.group(4, oldest=0)
    assert tasks_of(s.train()) == (2, 3)
    assert s.dropped == [(5, 4, (0, 1), "stale", True)]
    assert s.state.granted == s.state.retired + 4


def test_mask_keeps_a_group_with_one_token_inside_the_bound_and_drops_others() -> None:
    s = Stream(config(1, 1, stale="mask"))
    advance(s, 2, 1)
    s.group(0, oldest=0, newest=1)
    assert tasks_of(s.train()) == (0,)
    s.rollouts(3, view(0, oldest=0, newest=1, highest=3, reward=0.0), view(1, oldest=1, reward=1.0))
    assert s.dropped == [(4, 3, (0, 1), "stale", True)], "a newer token that is not trained does not help"
    s = Stream(config(1, 1, stale="mask"))
    s.group(0)
    s.group(1)
    s.train()
    s.group(2, oldest=0)
    s.train()
    assert s.dropped == [(3, 2, (0, 1), "stale", True)], "its tokens are two versions old"


def test_wait_closes_nothing_before_old_tasks_have_ended() -> None:
    s = Stream(config(1, 1, stale="wait"))
    s.group(1)
    s.train()
    s.group(2, oldest=1)
    assert s.close() is None, "task 0 was granted at version 0 = v - S"
    s.group(0)
    assert tasks_of(s.train()) == (0,)
    assert tasks_of(s.close()) == (2,)
    s = Stream(config(1, 1, stale="wait"))
    s.group(1)
    s.train()
    s.group(2, oldest=1)
    s.end(0)
    assert tasks_of(s.close()) == (2,)
    s = Stream(config(1, 1, stale="wait"))
    s.rollouts(0, view(0, reward=0.0))
    s.group(1)
    s.train()
    s.group(2, oldest=1)
    assert s.close() is None
    s.rollouts(0, view(1, reward=1.0))
    assert tasks_of(s.close()) == (0,)


def test_wait_never_drops_for_age() -> None:
    s = Stream(config(1, 0, stale="wait"))
    advance(s, 3, 0)
    s.group(3, oldest=0)
    assert tasks_of(s.close()) == (3,)
    s = Stream(config(1, 1, stale="wait"))
    s.group(0)
    s.group(1)
    s.train()
    s.group(2, oldest=0)
    assert tasks_of(s.train()) == (1,)
    assert s.state.version.number == 2 and s.state.drops == () and tasks_of(s.close()) == (2,)


def test_the_oldest_groups_go_first() -> None:
    s = Stream(config(2, 3))
    for task in range(2):
        s.group(task)
    s.train()
    s.group(4, oldest=1)
    s.group(3, oldest=0, newest=1)
    s.group(2, oldest=1)
    assert tasks_of(s.close()) == (2, 3), "by oldest token first, then by task"


def test_drop_goes_by_the_oldest_token_and_mask_by_the_newest_of_all_rollouts() -> None:
    for stale, kept in (("drop", False), ("mask", True)):
        s = Stream(config(1, 1, stale=stale))
        advance(s, 2, 1)
        s.rollouts(0, view(0, oldest=0, reward=0.0), view(1, oldest=2, reward=1.0))
        assert (0 in s.state.pending) == kept, stale
        assert [drop[3] for drop in s.dropped] == ([] if kept else ["stale"])


def test_what_is_still_to_be_completed_is_not_dropped_for_age() -> None:
    s = Stream(config(1, 1))
    s.rollouts(0, view(0, oldest=0, reward=0.0))
    advance(s, 3, 1)
    assert 0 in s.state.pending and s.state.drops == ()
    s.rollouts(0, view(1, oldest=3, reward=1.0))
    assert s.dropped == [(1, 0, (0,), "stale", False), (5, 0, (1,), "stale", True)]


def test_wait_goes_by_the_newest_grant_that_is_old_enough() -> None:
    s = Stream(config(1, 1, stale="wait"))
    s.state = replace(s.state, version=Version(0, 3), granted=6, grants=((1, 0), (2, 1), (4, 2), (6, 3)))
    s.group(0, oldest=3)
    s.group(1, oldest=3)
    s.group(2, oldest=3)
    assert s.close() is None, "v - S = 2, when tasks below 4 were granted: 3 is unfinished"
    s.end(3)
    assert tasks_of(s.close()) == (0,), "4 and 5 were granted at version 3"
