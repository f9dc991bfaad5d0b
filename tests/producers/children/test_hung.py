"""Which calls hang, and which are waited for no longer: plain numbers, and what Linux counts of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.producers.children.cores import Cores, Had
from streamrl.producers.children.hung import LEAST_S, UNWATCHED_S, Patience, Running
from tests.support.processes import until


def end(one: Patience, spent_s: float, times: int = 1, overtaken: int = 4) -> None:
    for _ in range(times):
        one.ended(Running(one.num_ended - overtaken, spent_s))


def patience(*, usual_s: float = 0.01, ended: int = 1000, most: int = 2) -> Patience:
    made = Patience(30.0, most=most)
    end(made, usual_s, ended)
    return made


def given_up(one: Patience, running: dict[str, Running]) -> list[str]:
    return one.too_many(running, seats=4)


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


def test_more_than_may_hang_are_waited_for_no_longer() -> None:
    one = patience()
    assert given_up(one, calls(5.0, 4.0, 3.0, 2.0, 0.02)) == ["a", "b", "c", "d"]
    assert given_up(one, calls(5.0, 4.0)) == []
    assert given_up(patience(most=1), calls(1.0, 2.0, 3.0)) == ["c", "b", "a"]


def test_slow_graders_are_told_from_hung_ones_by_the_first_that_ends() -> None:
    one = patience()
    running = calls(5.0, 4.0, 3.0, 2.0)
    assert given_up(one, running)
    end(one, 5.0, overtaken=1000)
    assert given_up(one, running) == []


def test_nobody_is_given_up_before_one_has_hung_for_certain() -> None:
    """On a machine that has too much to do all are slow, and some of them very."""
    one = patience(ended=2000)
    end(one, 0.06, overtaken=40)
    ended = one.num_ended
    assert given_up(one, calls(0.9, 0.9, 0.9)) == [], "less than a second"
    assert given_up(one, calls(1.1, 1.1, 1.1, before=ended - 15)) == [], "no others have overtaken them"
    end(one, 0.12)
    assert given_up(one, calls(1.1, 1.1, 1.1)) == [], "less than ten times the slowest"
    assert given_up(one, calls(1.3, 0.25, 0.25)) == ["a", "b", "c"]


def test_that_one_has_hung_is_forgotten() -> None:
    one = patience()
    assert given_up(one, calls(2.0)) == [], "it hangs for certain, and may"
    for ended, given in ((9_900, ["a", "b", "c"]), (200, [])):
        end(one, 0.01, ended)
        assert given_up(one, calls(0.5, 0.5, 0.5)) == given


def test_time_or_others_that_have_passed_it_are_enough() -> None:
    one = patience(ended=2000)
    end(one, 0.06, overtaken=40)
    given_up(one, calls(2.0))
    ended = one.num_ended
    assert given_up(one, calls(0.13, 0.13, 0.13, before=ended - 79)) == ["a", "b", "c"]
    assert given_up(one, calls(0.11, 0.11, 0.11, before=ended - 81)) == ["a", "b", "c"]
    assert given_up(one, calls(0.11, 0.11, 0.11, before=ended - 79)) == []


def test_little_is_known_of_how_slow_calls_are_while_few_have_ended() -> None:
    few = patience(ended=249)
    end(few, 0.05)
    given_up(few, calls(5.0))
    before = few.num_ended - 17  # the others were overtaken by 4
    assert given_up(few, calls(0.19, 0.19, 0.19, before=before + 1)) == [], "four times the slowest, and the most overtaken"
    assert given_up(few, calls(0.21, 0.21, 0.21, before=before + 1)) == ["a", "b", "c"]
    assert given_up(few, calls(0.19, 0.19, 0.19, before=before)) == ["a", "b", "c"]


def test_nobody_is_given_up_for_being_merely_long() -> None:
    """A judge that answers nobody: none has been overtaken, and each gets all of its time."""
    one = patience(ended=40)
    running = calls(*[25.0] * 8, before=40)
    assert all(map(one.hangs, running.values())) and given_up(one, running) == []


def test_what_was_slow_long_ago_is_forgotten() -> None:
    one = patience()
    end(one, 5.0, overtaken=400)
    end(one, 0.01, 1500)
    assert given_up(one, calls(9.0, 8.0, 7.0, before=one.num_ended - 500)) == [], "in the block before this one"
    end(one, 0.01, 2000)
    assert given_up(one, calls(9.0, 8.0, 7.0, before=one.num_ended - 500)) == ["a", "b", "c"]


def test_the_first_call_of_a_process_may_load_what_later_ones_find() -> None:
    one = patience(usual_s=0.001)
    first = {name: Running(0, 0.9, first=True) for name in "abc"}
    assert all(map(one.hangs, first.values())) and given_up(one, first) == []
    assert given_up(one, {name: Running(0, 1.1, first=True) for name in "abc"}) == ["a", "b", "c"]
    one.ended(Running(one.num_ended - 500, 0.9, first=True))
    assert given_up(one, calls(0.02, 0.02, 0.02)) == ["a", "b", "c"], "it says nothing of how slow the others are"


def test_a_short_call_has_had_its_own_time_and_a_suspended_one_what_was_watched() -> None:
    call = Running(0, began_s=10.0)
    call.look(10.05, 0.0, Had())
    assert abs(call.spent_s - 0.05) < 1e-9, "the watch has not counted it yet"
    call.look(500.0, 1.0, Had())
    assert call.spent_s == 1.0 + UNWATCHED_S


@pytest.mark.parametrize(
    ("had", "spent_s"),
    [
        (Had(ran_s=5.25, queued_s=3.0), 2.0),  # it sleeps, and never waited
        (Had(ran_s=5.25, queued_s=4.75), 0.25),  # it sleeps, and waited before
        (Had(ran_s=5.25, queued_s=3.0, runnable=True), 0.25),  # it waits since it began, and how long is not counted yet
        (Had(ran_s=7.0, queued_s=3.0, runnable=True), 2.0),  # it has had a core all the time
    ],
)
def test_time_in_which_its_process_waits_for_a_core_is_nobodys(had: Had, spent_s: float) -> None:
    call = Running(0, began_s=10.0, before=Had(ran_s=5.0, queued_s=3.0))
    call.look(12.0, 60.0, had)
    assert call.spent_s == spent_s
    call.look(12.5, 60.0, had._replace(runnable=True))
    assert call.spent_s == spent_s, "what it has had it keeps"


CODE = """
import sys
for line in sys.stdin:
    print("begun", flush=True)
    while line == "spin\\n":
        pass
"""


@pytest.mark.process
async def test_it_tells_what_sleeps_from_what_could_run() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:  # noqa: ASYNC220
        assert program.stdin is not None and program.stdout is not None
        cores = Cores(program.pid)
        assert cores.look() == Had(), "its threads are not known yet"
        if not Path("/proc/self/schedstat").exists():  # noqa: ASYNC240
            assert cores.look(state=True) == Had(), "the kernel does not count it"
            return program.kill()
        for line, runnable in ((b"sleep\n", False), (b"spin\n", True)):
            program.stdin.write(line)
            program.stdin.flush()
            program.stdout.readline()
            await until(lambda wanted=runnable: cores.look(state=True).runnable is wanted)
        ran_s = cores.look().ran_s
        await until(lambda: cores.look().ran_s > ran_s > 0)
        program.kill()
        program.wait()
        last = cores.look(state=True)
        assert last.ran_s > 0 and cores.look(state=True) == last, "of one that is gone it is what was known"
        cores.close()


@pytest.mark.process
async def test_where_nothing_is_counted_nobody_waits() -> None:
    cores = Cores(os.getpid())
    cores.look()
    files = len(os.listdir("/proc/self/fd"))
    cores.look()
    cores.close()
    assert len(os.listdir("/proc/self/fd")) == files
    gone = Cores(2**22 + 1)  # above any number of a process
    assert [gone.look(state=True) for _ in range(3)] == [Had()] * 3
