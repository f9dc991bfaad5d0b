"""Tasks that expire: which, when, and what becomes of what comes for them later."""

from __future__ import annotations

from tests.support.records import Stream, config, tasks_of, view


def advance(s: Stream, versions: int, first_task: int) -> int:
    """Train `versions` batches of fresh tasks; batch_tasks must be 1. Returns the next fresh task."""
    for task in range(first_task, first_task + versions):
        s.group(task, oldest=s.state.version.number)
        s.train()
    return first_task + versions


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
