"""Rewards in processes of their own: what hangs, dies or makes a mess costs its own rollout, and the others keep their rewards."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from streamrl.config.code_copies import VARIABLE, make_copies
from streamrl.producers.children.graders import Scoring
from streamrl.producers.groups import Group
from tests.support.processes import alive, until
from tests.support.user_code import Workshop, ends

pytestmark = pytest.mark.process

HANGS = {
    "def": [
        "time.sleep(3600)",
        "while True: pass",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",  # it holds the interpreter
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(3600)",
        "while True:\n            try: time.sleep(3600)\n            except BaseException: pass",
    ],
    "async def": [
        "await asyncio.sleep(3600)",
        "while True:\n            try: await asyncio.sleep(3600)\n            except BaseException: pass",
        "time.sleep(3600)",
    ],
}
"""Ways in which graders hang."""


def rewards(group: Group) -> dict[int, float | None]:
    """By rollout."""
    return {episode.rollout: episode.reward for episode in group.episodes}


@pytest.mark.parametrize("kind", HANGS)
async def test_graders_that_hang_cost_their_own_rollouts(workshop: Workshop, kind: str) -> None:
    """One of each, at once: rollout 2 of a task hangs in the task's own way, and one task has nothing that hangs."""
    lines = HANGS[kind]
    code = f"{kind} score(task, episode):\n" + "".join(
        f"    if (task.index, episode.rollout) == ({index}, 2):\n        {line}\n" for index, line in enumerate(lines)
    )
    scoring = Scoring(timeout_s=1.0, children=2, max_hung=len(lines), answer_s=1.0)
    async with workshop.runner(f"{code}    return 1.0\n", reward="score", scoring=scoring) as runner, asyncio.timeout(300):
        groups = await workshop.run(runner, *(workshop.task(index) for index in range(len(lines) + 1)))
        [after] = await workshop.run(runner, workshop.task(9))
    assert [rewards(group) for group in (groups.pop(), after)] == [{0: 1.0, 1: 1.0, 2: 1.0}] * 2
    for index, group in enumerate(groups):
        assert rewards(group) == {0: 1.0, 1: 1.0}, lines[index]
        [failure] = group.failures
        assert (
            failure.reason == "timeout" and "1 s of user code" in failure.detail and f"(task {index}, row 0, rollout 2)" in failure.detail
        )


async def test_a_group_reward_gets_all_episodes_in_one_call_and_ends_with_it(workshop: Workshop) -> None:
    code = """
class Compares:
    async def score(self, task, episodes):
        tell("called", len(episodes))
        if task.index == 1:
            await asyncio.sleep(3600)
        return [float(episode.rollout) for episode in episodes]
"""
    groups = await workshop.played(code, *(workshop.task(index) for index in range(3)), reward="Compares", scoring=Scoring(timeout_s=1.5))
    assert [rewards(group) for group in groups] == [{0: 0.0, 1: 1.0, 2: 2.0}, {}, {0: 0.0, 1: 1.0, 2: 2.0}]
    assert {failure.reason for failure in groups[1].failures} == {"timeout"}
    assert [words[1] for words in workshop.told("called")] == ["3"] * 3


DEATHS = {
    "def": [("os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"), ("os.closerange(3, 4096)", "died: it")],
    "async def": [
        ("os._exit(7)", "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
        ("os.closerange(3, 4096)", "died: it"),
    ],
}
"""Ways in which graders kill their process, and words that say so."""


@pytest.mark.parametrize("kind", ["def", pytest.param("async def", marks=pytest.mark.slow)])
async def test_a_grader_that_kills_its_process_costs_its_own_rollout(workshop: Workshop, kind: str) -> None:
    code = f"{kind} score(task, episode):\n    if episode.rollout != 2:\n        return 1.0\n    tell('struck', task.index)\n" + "".join(
        f"    if task.index == {index}:\n        {line}\n" for index, (line, _) in enumerate(DEATHS[kind])
    )
    scoring = Scoring(timeout_s=60, children=1)
    async with workshop.runner(f"{code}    return 1.0\n", reward="score", scoring=scoring, max_deaths=2) as runner, asyncio.timeout(300):
        for index, (line, said) in enumerate(DEATHS[kind]):
            [group] = await workshop.run(runner, workshop.task(index))
            assert rewards(group) == {0: 1.0, 1: 1.0}, line
            assert ends(group)[2].startswith("failed: reward:") and said in ends(group)[2]
            # Among others first, then alone; only SIGKILL, which may be the kernel's or somebody's hand, is given further tries.
            assert [words[1] for words in workshop.told("struck")].count(str(index)) == (4 if "SIGKILL" in line else 2)
        [after] = await workshop.run(runner, workshop.task(9))
    assert rewards(after) == {0: 1.0, 1: 1.0, 2: 1.0}


async def test_kill_9_of_a_process_that_loads_is_nobodys_fault(workshop: Workshop) -> None:
    code = """
if len((FOLDER / "loads").read_text().splitlines() if (FOLDER / "loads").exists() else []) < 2:
    tell("loads")
    os.kill(os.getpid(), signal.SIGKILL)


def score(task, episode):
    return 1.0
"""
    [group] = await workshop.played(code, workshop.task(), reward="score", scoring=Scoring(children=1))
    assert rewards(group) == {0: 1.0, 1: 1.0, 2: 1.0}
    assert len(workshop.told("loads")) == 2


MESS = [
    "os.chdir('/'); Path('/proc/self/oom_score_adj').write_text('500')",
    "os.fork()",
    "os.fork(); os.fork(); print('many')",
    "signal.setitimer(signal.ITIMER_REAL, 0.05)",
    "sys.stdout.close(); os.closerange(0, 3)",
    "sys.setrecursionlimit(100000)",
    "threading.Thread(target=time.sleep, args=(3600,)).start()",
    "import subprocess; subprocess.Popen(['sleep', '3600'])",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGUSR2, signal.SIG_IGN)",
    "asyncio.run(asyncio.sleep(0))",
]
"""What a grader leaves to those after it in its process."""


async def test_what_a_grader_leaves_behind_hurts_nobody(workshop: Workshop) -> None:
    """One process; each mess is made twice, and after it others are graded."""
    code = (
        "".join(f"\n\ndef mess_{index}():\n    {line}\n" for index, line in enumerate(MESS))
        + f"""

MESSES = [{", ".join(f"mess_{index}" for index in range(len(MESS)))}]


def score(task, episode):
    tell("graded", os.getcwd())
    if task.index % 2 == 0:
        MESSES[task.index // 2]()
        return 1.0
    time.sleep(0.1)
    return 0.5
"""
    )
    async with workshop.runner(code, reward="score", scoring=Scoring(timeout_s=20, children=1)) as runner, asyncio.timeout(300):
        groups = [group for index in range(2 * len(MESS)) for group in await workshop.run(runner, workshop.task(index, num_rollouts=2))]
    assert [rewards(group) for group in groups] == [{0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.5}] * len(MESS)
    told = workshop.told("graded")
    assert {words[1] for words in told} == {os.getcwd()}
    assert len(told) == 4 * len(MESS) and len({pid for pid, _ in told}) == 1


async def test_a_process_in_which_much_is_left_behind_is_replaced(workshop: Workshop) -> None:
    code = """
def score(task, episode):
    tell("graded")
    for _ in range(40):
        threading.Thread(target=time.sleep, args=(3600,)).start()
    return 1.0
"""
    async with workshop.runner(code, reward="score", scoring=Scoring(children=1)) as runner, asyncio.timeout(300):
        groups = [group for index in range(3) for group in await workshop.run(runner, workshop.task(index, num_rollouts=1))]
        pids = {int(pid) for pid, *_ in workshop.told("graded")}
        assert len(pids) == 3
        await until(lambda: not any(alive(pid) for pid in pids))
    assert [rewards(group) for group in groups] == [{0: 1.0}] * 3


async def test_prints_without_end_and_memory_are_bounded(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    code = """
KEPT = []


def score(task, episode):
    match episode.rollout:
        case 0:
            for _ in range(1 << 6):
                os.write(1, b"x" * (1 << 20))
        case 1:
            while True:
                KEPT.append(bytearray(64 << 20))
    return 1.0
"""
    caplog.set_level("INFO")
    scoring = Scoring(timeout_s=60, children=1)
    async with workshop.runner(code, reward="score", scoring=scoring, memory_bytes=3 << 27) as runner, asyncio.timeout(300):
        [group] = await workshop.run(runner, workshop.task())
        [after] = await workshop.run(runner, workshop.task(1))
    assert rewards(group) == {0: 1.0, 2: 1.0}
    assert ends(group)[1].startswith("failed: reward: MemoryError")
    assert rewards(after) == {0: 1.0, 2: 1.0}
    assert len(caplog.text) < 2_000_000


async def test_graders_that_hang_hold_up_no_others(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    """One in twelve hangs, far more than there are processes and slots; nobody waits for them, and two go on as witnesses."""
    code = """
def score(task, episode):
    if 5 <= task.index < 60 and task.index % 3 == 0 and episode.rollout == 2:
        time.sleep(3600)
    return 1.0
"""
    caplog.set_level("INFO")
    scoring = Scoring(timeout_s=600, children=2, max_hung=2, ends_s=600)
    async with workshop.runner(code, reward="score", scoring=scoring) as runner, asyncio.timeout(300):
        await workshop.run(runner, *(workshop.task(index, num_rollouts=4) for index in range(5)))
        groups = await workshop.run(runner, *(workshop.task(index, num_rollouts=4) for index in range(5, 80)))
        hung = runner.take_hung_graders()
        [after] = await workshop.run(runner, workshop.task(81, num_rollouts=4))
    failed = [failure for group in groups for failure in group.failures]
    assert hung.calls == 2 and hung.ended_early == len(failed) == 18
    assert {failure.reason for failure in failed} == {"timeout"} and all("reward.max_hung = 2" in failure.detail for failure in failed)
    assert all(len(group.episodes) == 4 - len(group.failures) for group in groups)
    assert rewards(after) == dict.fromkeys(range(4), 1.0)
    # A call that is told to end takes some time for it, and keeps its process.
    assert "child_killed" not in caplog.text


async def test_a_quick_grader_whose_process_gets_no_core_does_not_hang(workshop: Workshop) -> None:
    """As beside other work: while others hang for certain, one process gets next to nothing of a core that it shares."""
    code = """
import subprocess


def starve():
    core = min(os.sched_getaffinity(0))
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {core})
    # In the process's own session: the kernel may give each session an equal share.
    for _ in range(3):
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def score(task, episode):
    if 40 <= task.index < 43 and episode.rollout == 0:
        time.sleep(3600)
    if task.index == 100:
        starve()
    return 1.0
"""
    scoring = Scoring(timeout_s=600, children=2, max_hung=2)
    async with workshop.runner(code, reward="score", scoring=scoring) as runner, asyncio.timeout(150):
        await workshop.run(runner, *(workshop.task(index) for index in range(40)))
        hung = await workshop.run(runner, *(workshop.task(index) for index in range(40, 60)))
        assert [len(group.failures) for group in hung] == [1] * 3 + [0] * 17, "more hang than may"
        await workshop.run(runner, workshop.task(100, num_rollouts=1))
        groups = await workshop.run(runner, *(workshop.task(index) for index in range(101, 300)))
        assert runner.take_hung_graders().ended_early == 3
    assert all(rewards(group) == {0: 1.0, 1: 1.0, 2: 1.0} for group in groups)


async def test_a_task_that_is_given_back_frees_its_graders(workshop: Workshop) -> None:
    code = """
def score(task, episode):
    if task.index == 0:
        tell("began")
        time.sleep(3600)
    return 1.0
"""
    async with workshop.runner(code, reward="score", scoring=Scoring(timeout_s=600, children=1)) as runner, asyncio.timeout(300):
        given_back = asyncio.create_task(runner.run(workshop.task(0)))
        await until(lambda: bool(workshop.told("began")))
        given_back.cancel()
        [group] = await workshop.run(runner, workshop.task(1))
    assert rewards(group) == {0: 1.0, 1: 1.0, 2: 1.0}


async def test_a_process_that_is_started_later_grades_by_the_code_of_the_start(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, signal\n\ndef score(task, episode):\n    tell('graded')\n    return 0.25\n"
    copies = workshop.folder / "copies"
    monkeypatch.setenv(VARIABLE, str(copies))
    async with workshop.runner(code, producer="good") as _:
        make_copies(copies, [workshop.folder / "code.py"])
    async with workshop.runner(code.replace("0.25", "0.75"), reward="score", scoring=Scoring(children=1)) as runner:
        [first] = await workshop.run(runner, workshop.task(num_rollouts=2))
        os.kill(int(workshop.told("graded")[0][0]), signal.SIGKILL)
        [second] = await workshop.run(runner, workshop.task(1, num_rollouts=2))
    assert rewards(first) == rewards(second) == {0: 0.25, 1: 0.25}
    assert len({pid for pid, *_ in workshop.told("graded")}) == 2
