"""The fold's policies for age: what is dropped, what is waited for, what goes first, and what expires."""

from msgspec.structs import replace

from streamrl.schemas.versions import Version
from tests.support.records import Stream, config, tasks_of, view


def advance(s: Stream, versions: int, first_task: int) -> int:
    """Train `versions` batches of fresh tasks; batch_tasks must be 1. Returns the next fresh task."""
    for task in range(first_task, first_task + versions):
        s.group(task, oldest=s.state.version.number)
        s.train()
    return first_task + versions


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


def test_age_is_that_of_the_oldest_or_newest_token_and_of_complete_groups() -> None:
    for stale, kept in (("drop", False), ("mask", True)):
        s = Stream(config(1, 1, stale=stale))
        advance(s, 2, 1)
        s.rollouts(0, view(0, oldest=0, reward=0.0), view(1, oldest=2, reward=1.0))
        assert (0 in s.state.pending) == kept, stale
        assert [drop[3] for drop in s.dropped] == ([] if kept else ["stale"])
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


def expired(s: Stream) -> list[tuple[int, int, bool]]:
    return [(d.sequence, d.task, d.retires) for d in s.state.drops if d.reason == "expired"]


def test_a_task_ends_so_many_versions_after_its_grant_whatever_is_missing() -> None:
    s = Stream(config(1, 1, expire_versions=3))
    advance(s, 2, 1)
    assert s.state.drops == () and s.state.first_open == 0
    granted = s.state.granted
    advance(s, 1, 3)
    assert s.dropped == [(0, 0, (), "expired", True)] and " 3 versions" in s.state.drops[0].detail
    assert s.state.granted == granted + 2, "one for the trained task, one for the expired one"
    assert (s.state.watermark, s.state.first_open) == (4, 4)
    s.group(0, oldest=0)
    assert s.dropped[1:] == [(4, 0, (0, 1), "late", False)]
    s.end(0)
    assert [d.reason for d in s.state.drops[2:]] == ["late"]
    s = Stream(config(1, 1, expire_versions=2))
    s.rollouts(0, view(0, reward=1.0))
    advance(s, 2, 1)
    assert s.dropped == [(1, 0, (0,), "expired", False), (0, 0, (), "expired", True)]
    assert s.state.oldest_needed == s.state.cursor + 1, "its message is needed no more"
    s = Stream(config(1, 1, expire_versions=2))
    s.end(0, 1)
    advance(s, 2, 1)
    assert expired(s) == [(0, 0, True)]


def test_a_complete_group_does_not_expire_and_a_later_grant_expires_later() -> None:
    s = Stream(config(1, 1, stale="mask", expire_versions=2))
    s.rollouts(0, view(0, oldest=0), view(1, oldest=0))
    after = advance(s, 3, 1)
    assert expired(s) == []
    s = Stream(config(2, 2, expire_versions=3))
    s.group(5, oldest=0)
    for first in (0, 2):
        s.group(first)
        s.group(first + 1)
        s.train()
    assert expired(s) == [] and 5 in s.state.pending
    assert after == 4
    s = Stream(config(1, 2, expire_versions=3))
    s.group(1)
    s.train()
    assert s.state.granted == 4, "task 3 was granted at version 1"
    s.group(2)
    s.train()
    advance(s, 1, 4)
    assert expired(s) == [(0, 0, True)]
    advance(s, 1, 5)
    assert expired(s) == [(0, 3, True)]


def test_no_task_expires_in_time_under_wait_or_in_the_warm_up() -> None:
    def ends(**options: object) -> list[tuple[int, int, bool]]:
        s = Stream(config(1, 2, **options))
        advance(s, 2, 1)
        return expired(s)

    assert ends(delay_versions=1, expire_versions=2) == [(0, 0, True)], "engines lag by one version"
    assert ends(expire_versions=2) == []
    assert ends(delay_versions=1, expire_versions=2, stale="wait") == []
    assert ends(delay_versions=1) == []
    s = Stream(config(1, 1, warmup_steps=9, expire_versions=2))
    for task in range(1, 6):
        s.demonstration(task)
        s.train(warm=False)
    assert s.state.drops == () and s.state.first_open == 0
    s.demonstration(0)
    assert tasks_of(s.close()) == (0,)


def test_what_is_open_is_told_with_the_grant() -> None:
    s = Stream(config(1, 3))
    s.group(0)
    s.rollouts(1, view(0, reward=1.0))
    assert (s.state.grant.first_open, s.state.is_open(0), s.state.is_open(1), s.state.is_open(2)) == (1, False, True, True)
    s.rollouts(1, view(1, reward=0.0))
    s.end(2)
    assert s.state.grant.first_open == 3
    s.end(3)
    assert s.state.grant.first_open == 4, "granted anew with the ends of 2 and 3"
