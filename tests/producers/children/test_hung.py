"""Which calls hang, and which are ended: plain numbers."""

from __future__ import annotations

from streamrl.producers.children.hung import LEAST_S, UNWATCHED_S, Patience, Running


def end(one: Patience, spent_s: float, times: int = 1, overtaken: int = 4) -> None:
    for _ in range(times):
        one.ended(Running(one.num_ended - overtaken, spent_s))


def patience(*, usual_s: float = 0.01, ended: int = 100, most: int = 2) -> Patience:
    made = Patience(30.0, most=most, seats=4)
    end(made, usual_s, ended)
    return made


def calls(*spent_s: float, before: int = 0) -> dict[str, Running]:
    return {name: Running(before, seconds) for name, seconds in zip("abcdefgh", spent_s, strict=False)}


def test_a_call_hangs_once_it_is_far_slower_than_others() -> None:
    brief = patience(usual_s=0.001)
    assert brief.hangs(Running(0, LEAST_S + 0.01)) and not brief.hangs(Running(0, LEAST_S))
    assert patience(usual_s=0.5).hangs(Running(0, 5.1)) and not patience(usual_s=0.5).hangs(Running(0, 4.9))


def test_without_anything_to_compare_with_a_third_of_its_time_is_long() -> None:
    one = patience(ended=0)
    assert not one.hangs(Running(0, 9.9))
    assert one.hangs(Running(0, 10.1))


def test_the_longest_is_left_and_those_after_it_are_ended() -> None:
    one = patience()
    assert one.too_many(calls(5.0, 4.0, 3.0, 2.0, 0.1)) == ["b", "c"]
    assert one.too_many(calls(5.0, 4.0)) == []
    assert patience(most=1).too_many(calls(1.0, 2.0, 3.0)) == ["b", "a"]


def test_slow_graders_are_told_from_hung_ones_by_the_first_that_ends() -> None:
    one = patience()
    running = calls(5.0, 4.0, 3.0, 2.0)
    assert one.too_many(running)
    end(one, 5.0, overtaken=100)
    assert one.too_many(running) == []


def test_a_machine_that_stood_still_for_a_while_hides_nothing() -> None:
    """All calls of a second took that long, so time says nothing for a while; but nobody ended during them."""
    one = patience()
    end(one, 3.0, times=4)
    assert one.too_many(calls(5.0, 4.0, 3.0, 2.0)) == ["b", "c"]


def test_nobody_is_ended_for_being_merely_long() -> None:
    """A judge that answers nobody: none has been overtaken, and each gets all of its time."""
    one = patience(ended=40)
    running = calls(*[25.0] * 8, before=40)
    assert all(map(one.hangs, running.values())) and one.too_many(running) == []


def test_what_was_slow_long_ago_is_forgotten() -> None:
    one = patience()
    end(one, 5.0, overtaken=400)
    end(one, 0.01, 900)
    assert one.too_many(calls(9.0, 8.0, 7.0, before=one.num_ended - 500)) == [], "in the block before this one"
    end(one, 0.01, 2000)
    assert one.too_many(calls(9.0, 8.0, 7.0, before=one.num_ended - 500)) == ["b"]


def test_nobody_is_ended_within_a_tenth_of_a_second() -> None:
    """Before the first slow call has ended nothing tells it from one that hangs."""
    one = patience(usual_s=0.001)
    brief = calls(0.09, 0.08, 0.07, 0.06)
    assert all(map(one.hangs, brief.values())) and one.too_many(brief) == []
    assert one.too_many(calls(0.14, 0.13, 0.12, 0.11)) == ["b", "c"]


def test_a_short_call_has_had_its_own_time_and_a_suspended_one_what_was_watched() -> None:
    call = Running(0, began_s=10.0)
    call.look(10.05, 0.0)
    assert abs(call.spent_s - 0.05) < 1e-9, "the watch has not counted it yet"
    call.look(500.0, 1.0)
    assert call.spent_s == 1.0 + UNWATCHED_S
