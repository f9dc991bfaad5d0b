"""User code that breaks the process which it shares with others: it costs its own call, and the process is replaced."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamrl.errors import ConfigError
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.graders import Scoring
from tests.support.processes import alive, until
from tests.support.user_code import Workshop, ends

pytestmark = pytest.mark.process

BREAKS = [
    "for task in asyncio.all_tasks(): task.cancel()",
    "asyncio.Queue = None",
    "asyncio.get_running_loop().create_task = None",
    "time.monotonic = lambda: 0.0",
]
"""Things that rollout 0 of task i does to everybody who is in its process."""
LIMITS = Limits(idle_s=3.0, total_s=60.0, answer_s=1.0)
SCORING = Scoring(timeout_s=3.0, children=1, answer_s=1.0)


def breaking(signature: str, then: str) -> str:
    """An async function that breaks its process in the task's own way, and later goes on."""
    lines = "".join(f"\n        if task.index == {index}:\n            {line}" for index, line in enumerate(BREAKS))
    return f"async def breaks{signature}:\n    if rollout_of(task, given) == 0:{lines}\n    await asyncio.sleep(0.05)\n    return {then}\n"


@pytest.mark.parametrize(
    ("kind", "signature", "rollout", "then"),
    [
        ("producer", "(task, given)", "given.context.rollout_index", "await good(task, given)"),
        ("reward", "(task, given)", "given.rollout", "1.0"),
    ],
)
async def test_what_breaks_its_process_costs_nobody_else(workshop: Workshop, kind: str, signature: str, rollout: str, then: str) -> None:
    code = f"def rollout_of(task, given):\n    return {rollout}\n\n\n" + breaking(signature, then)
    named: dict[str, Any] = {kind: "breaks"}
    async with workshop.runner(code, limits=LIMITS, scoring=SCORING, **named) as runner:
        for index, line in enumerate(BREAKS):
            broken, neighbour = await workshop.run(runner, workshop.task(index, num_rollouts=4), workshop.task(9, num_rollouts=4))
            assert ends(neighbour) == dict.fromkeys(range(4), "episode"), line
            assert {rollout: end for rollout, end in ends(broken).items() if rollout} == dict.fromkeys(range(1, 4), "episode"), line
        [after] = await workshop.run(runner, workshop.task(9, num_rollouts=4))
    assert ends(after) == dict.fromkeys(range(4), "episode")


async def test_tasks_that_another_rollout_has_cancelled_are_nobodys_failure(workshop: Workshop) -> None:
    """Each rollout waits for a task of its own, which one of another group cancels."""
    code = """
async def strikes(task, engine):
    if me(task, engine) == (0, 0):
        await asyncio.sleep(0.2)
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        return await good(task, engine)
    await asyncio.create_task(asyncio.sleep(0.5))
    return await good(task, engine)
"""
    async with workshop.runner(code, producer="strikes", limits=LIMITS) as runner:
        groups = await workshop.run(runner, *(workshop.task(index) for index in range(3)))
    assert [ends(group) for group in groups[1:]] == [dict.fromkeys(range(3), "episode")] * 2


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_rewards_are_not_those_of_a_process_in_which_they_come_out_otherwise(workshop: Workshop, kind: str) -> None:
    code = f"""
import builtins

CASES = ["builtins.sum = lambda *_: 0.0", "Episode.completion = property(lambda _: 'x')", "builtins.float = lambda _: 0.0"]


{kind} score(task, episode):
    if task.index < len(CASES) and episode.rollout == 0:
        exec(CASES[task.index])
    return {{"answer": 0.5, "form": 0.25 if episode.completion == "7" else 0.0}}
"""
    async with workshop.runner(code, reward="score", scoring=SCORING) as runner:
        for index in range(3):
            [broken] = await workshop.run(runner, workshop.task(index))
            [after] = await workshop.run(runner, workshop.task(9))
            assert {episode.rollout: episode.reward for episode in broken.episodes if episode.rollout} == {1: 0.75, 2: 0.75}
            assert {episode.rollout: episode.reward for episode in after.episodes} == {0: 0.75, 1: 0.75, 2: 0.75}


async def test_a_request_for_a_version_that_may_never_come_is_refused(workshop: Workshop) -> None:
    code = """
from streamrl.engines.protocol import GenerateRequest


async def waits(task, engine):
    if me(task, engine) == (0, 1):
        async for chunk in engine.context.engine.generate(GenerateRequest(request_id="x", prompt_ids=(1,), seeds=(1,), min_version=10**6)):
            pass
    return await good(task, engine)
"""
    async with workshop.runner(code, producer="waits", limits=LIMITS) as runner, asyncio.timeout(60):
        [group] = await workshop.run(runner, workshop.task())
    found = ends(group)
    assert found | {1: "episode"} == dict.fromkeys(range(3), "episode") and "min_version = 1000000" in found[1]


async def test_a_child_whose_main_thread_ends_does_so_too(workshop: Workshop) -> None:
    """A plain grader leaves a signal that strikes between calls, and a thread that would keep the process."""
    code = """
def strike(*_):
    raise RuntimeError("late")


def score(task, episode):
    tell("graded")
    if task.index == 0:
        threading.Thread(target=time.sleep, args=(3600,)).start()
        signal.signal(signal.SIGUSR1, strike)
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
    return 1.0
"""
    async with workshop.runner(code, reward="score", scoring=SCORING) as runner:
        [first] = await workshop.run(runner, workshop.task(num_rollouts=1))
        await until(lambda: not alive(int(workshop.told("graded")[0][0])))
        [after] = await workshop.run(runner, workshop.task(1, num_rollouts=1))
    assert ends(first) == ends(after) == {0: "episode"}
    assert len({pid for pid, *_ in workshop.told("graded")}) == 2


async def test_code_that_breaks_the_interpreter_when_it_is_imported_is_said_at_the_start(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match="user code has broken its process"):
        async with workshop.runner("asyncio.Queue = None", producer="good"):
            pass
