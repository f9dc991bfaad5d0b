"""User code does what it likes: its rollout ends and says why, the worker and everybody else go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from streamrl.errors import ConfigError
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.graders import Scoring
from tests.support.processes import alive, read_pids, until
from tests.support.programs import Start
from tests.support.user_code import Workshop, ends

pytestmark = pytest.mark.process

STRANGE = [
    ("sys.exit(3)", "SystemExit: 3"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("raise BaseException('neither')", "BaseException: neither"),
    ("raise asyncio.CancelledError", "CancelledError"),
    ("def deep(): return deep() + 1\n    deep()", "RecursionError: maximum recursion depth"),
    ("return {'reward': 1.0}", "expected an Episode, or a list of them, got dict"),
    ("return chat.episode(reward='1.0')", "its reward must be a number, got the text '1.0'"),
    ("return chat.episode(reward=float('nan'))", "its reward must be finite, got nan"),
    ("return engine.chat(task).episode()", "no turn was generated"),
    ("return chat.episode('right')", "takes 1 positional argument but 2 were given"),
    ("return chat.episode(metadata={'score': np.float32(1)})", "metadata cannot be stored: Encoding objects of type numpy.float32"),
    ("return chat.episode(metadata={'text': '\\ud800'})", "metadata cannot be stored"),
    ("return chat.episode(metadata={'text': 'x' * 40_000_000})", "metadata may have 1048576 bytes, got 40000011"),
    ("made = chat.episode(); made.turns = ('x' * 40_000_000,); return made", "at most 33554432 can be handed over"),
    ("return [chat.episode(), chat.episode(metadata={'again': 1})]", "would be trained a second time"),
    ("made = chat.episode(); return [made, Episode(segments=made.segments, finish_reason='stop')]", "would be trained a second time"),
    ("return chat.episode(reward_parts={'answer': 'yes'})", "got 'yes' for part 'answer'"),
    ("return chat.episode(status='odd')", "'odd' is not a valid Status"),
    ("chat.append([-1]); return chat.episode()", "token ids must be 0 or more"),
    ("chat.append(['a']); return chat.episode()", "invalid literal for int()"),
    ("return bytearray(20 << 30)", "MemoryError"),
    ("class Odd(Exception): __str__ = None\n    raise Odd", "Odd"),
    ("e = chat.branch().episode(); e.branch = Branch(0, 10**6); return [chat.episode(), e]", "to begin with 1000000 tokens"),
    ("print('\\ud800'); raise ValueError('\\ud800')", "can't encode character"),
]
"""What rollout 1 of a task does after a turn, and what is said of it."""
REWARDS = [
    ("sys.exit(3)", "SystemExit: 3"),
    ("raise ValueError('no verdict')", "no verdict"),
    ("return 'good'", "got 'good' for reward"),
    ("return float('nan')", "must be finite"),
    ("return None", "got NoneType for reward"),
]


def cases(kind: str, take: str, lines: Sequence[str]) -> str:
    """One function that does line i in rollout 1 of task i, as a table of functions."""
    functions = "\n\n\n".join(f"{kind} case_{i}{take}:\n    {line}" for i, line in enumerate(lines))
    return f"{functions}\n\n\nCASES = [{', '.join(f'case_{i}' for i in range(len(lines)))}]\n"


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_a_rollout_ends_alone_and_says_why(workshop: Workshop, kind: str) -> None:
    wait = "await " if kind == "async def" else ""
    code = (
        "from streamrl.schemas.samples import Branch\n\n"
        + cases(kind, "(task, engine, chat)", [line for line, _ in STRANGE])
        + f"""
{kind} strange(task, engine):
    chat = engine.chat(task)
    {wait}chat.generate()
    if engine.context.rollout_index != 1:
        return chat.episode()
    return {wait}CASES[task.index](task, engine, chat)
"""
    )
    async with workshop.runner(code, producer="strange", memory_bytes=4 << 30, limits=Limits(idle_s=60.0, total_s=60.0)) as runner:
        for index, (line, said) in enumerate(STRANGE):
            [group] = await workshop.run(runner, workshop.task(index))
            found = ends(group)
            assert (found[0], found[2]) == ("episode", "episode"), line
            assert found[1].startswith("failed: ") and said in found[1], line


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_a_reward_fails_its_rollout_alone(workshop: Workshop, kind: str) -> None:
    wait = "await " if kind == "async def" else ""
    code = (
        cases(kind, "(task, episode)", [line for line, _ in REWARDS])
        + f"""
{kind} score(task, episode):
    return 0.5 if episode.rollout != 1 else {wait}CASES[task.index](task, episode)
"""
    )
    async with workshop.runner(code, reward="score") as runner:
        for index, (line, said) in enumerate(REWARDS):
            [group] = await workshop.run(runner, workshop.task(index))
            assert {episode.rollout: episode.reward for episode in group.episodes} == {0: 0.5, 2: 0.5}, line
            assert [failure.rollout for failure in group.failures] == [1]
            assert group.failures[0].detail.startswith("reward: ") and said in group.failures[0].detail, line
            assert group.failures[0].detail.endswith(f"(task {index}, row 0, rollout 1)")


async def test_requests_that_are_none_end_their_rollout(workshop: Workshop) -> None:
    code = """
from streamrl.engines.protocol import GenerateRequest


async def asks(task, engine):
    match engine.context.rollout_index:
        case 0:
            await engine.chat(["a", "b"]).generate()
        case 1:
            await engine.context.checkpoint("no bytes")
        case 2:
            async for chunk in engine.context.engine.generate(GenerateRequest(request_id="r", prompt_ids=[1], seeds=[2**70])):
                pass
        case 3:
            asked = GenerateRequest(request_id="r", prompt_ids=(1,), seeds=(1,), min_version=10**6)
            async for chunk in engine.context.engine.generate(asked):
                pass
    return await good(task, engine)
"""
    async with asyncio.timeout(60):  # a version that may never come is not waited for
        [group] = await workshop.played(code, workshop.task(num_rollouts=5), producer="asks")
    found = ends(group)
    assert found[4] == "episode"
    for rollout, said in enumerate(["cannot be handed over"] * 3 + ["min_version = 1000000"]):
        assert found[rollout].startswith("failed: ") and said in found[rollout]


DEATHS = [
    ("os._exit(7)", "exit code 7"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
    ("os.closerange(3, 4096)", "its process ended"),
]


async def test_a_task_that_kills_its_process_ends_and_takes_nobody_along(workshop: Workshop) -> None:
    """One death among others, which is nobody's fault yet, and as many alone as tasks may have; test_rollouts has the default of these."""
    code = (
        cases("async def", "()", [line for line, _ in DEATHS])
        + """
async def deadly(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    if task.index < len(CASES):
        tell("struck", task.index)
        await CASES[task.index]()
    return chat.episode()
"""
    )
    async with workshop.runner(code, producer="deadly", max_deaths=2) as runner:
        for index, (line, said) in enumerate(DEATHS):
            *others, deadly = await workshop.run(runner, *(workshop.task(one, num_rollouts=2) for one in (8, 9, index)))
            assert [ends(group) for group in others] == [{0: "episode", 1: "episode"}] * 2, line
            assert {failure.reason for failure in deadly.failures} == {"deliveries"}
            assert "died 2 times" in deadly.failures[0].detail and said in deadly.failures[0].detail
            assert len({pid for pid, task in workshop.told("struck") if task == str(index)}) == 3


async def test_prints_threads_and_closed_outputs_hurt_nobody(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    code = """
async def noisy(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    print("hello", me(task, engine))
    for _ in range(50_000):
        print("x" * 1000)
    if task.index == 0:
        os.write(1, b"y" * 1_000_000 + b"\\n")
        sys.stdout.close()
        os.close(1)
        os.close(2)
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return chat.episode()
"""
    caplog.set_level("INFO")
    async with workshop.runner(code, producer="noisy", limits=Limits(idle_s=60.0, total_s=60.0)) as runner:
        [group] = await workshop.run(runner, workshop.task(num_rollouts=1))
        [again] = await workshop.run(runner, workshop.task(1, num_rollouts=1))
    assert len(group.episodes) == len(again.episodes) == 1
    assert "task=0 rollout=0 event=printed hello (0, 0)" in caplog.text
    assert "lines_left_out" in caplog.text
    assert len(caplog.text) < 2_000_000


async def test_tracebacks_are_told_once_and_every_failure_is(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    code = """
async def fails(task, engine):
    raise ValueError("broken tool")
"""
    [group] = await workshop.played(code, workshop.task(num_rollouts=20), producer="fails")
    line = (workshop.folder / "code.py").read_text().splitlines().index('    raise ValueError("broken tool")') + 1
    assert [failure.detail for failure in group.failures] == [f"ValueError: broken tool in code.py:{line}"] * 20
    assert len([record for record in caplog.records if record.exc_text and "broken tool" in record.exc_text]) == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def good(): pass", "expected a function of (task, engine)"),
        ("raise ImportError('no such tool')", "no such tool"),
        ("sys.exit(5)", "SystemExit: 5"),
        ("os._exit(5)", "exit code 5"),
        ("asyncio.Queue = None", "user code has broken its process"),
    ],
)
async def test_code_that_cannot_be_loaded_is_said_at_the_start(workshop: Workshop, code: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(").replace(")", r"\)")):
        async with workshop.runner(code, producer="good"):
            pass


async def test_class_producers_are_made_once_a_child_and_rewards_have_others(workshop: Workshop) -> None:
    code = """
class Groups:
    def __init__(self):
        tell("made")

    async def rollout(self, task, context):
        from streamrl.producers.functions import FunctionProducer
        tell("rolled")
        given = await FunctionProducer(good).rollout(task, context)
        return [given[2], Failure(0, "filtered", "too easy")]


def score(task, episode):
    tell("scored")
    return 0.25
"""
    groups = await workshop.played(code, *(workshop.task(index) for index in range(3)), producer="Groups", reward="score")
    for group in groups:
        assert [(episode.rollout, episode.reward) for episode in group.episodes] == [(2, 0.25)]
        assert [(failure.rollout, failure.reason) for failure in group.failures] == [(0, "filtered"), (1, "failed")]
    assert len(workshop.told("made")) == 1
    assert not {pid for pid, *_ in workshop.told("rolled")} & {pid for pid, *_ in workshop.told("scored")}


WORKER = """
import asyncio
import sys
from pathlib import Path

from streamrl.producers.children.calls import Limits
from streamrl.producers.children.frames import Hello
from streamrl.producers.children.pool import Children


async def main(code, model):
    hello = Hello(function=f"{code}:Starts", model_dir=model, max_len=64, chat_template=True, memory_bytes=0)
    await Children(hello, Limits(idle_s=30, total_s=60), count=1).start()
    await asyncio.sleep(3600)


asyncio.run(main(*sys.argv[1:]))
"""
STARTS = """
import os
import subprocess
from pathlib import Path


class Starts:
    def __init__(self):
        child = subprocess.Popen(["sleep", "3600"])
        Path(__file__).with_name("pids").write_text(f"{os.getpid()} {child.pid} ")

    async def rollout(self, task, context): ...
"""


async def test_a_worker_that_is_killed_takes_along_what_user_code_has_started(workshop: Workshop, start: Start) -> None:
    (workshop.folder / "code.py").write_text(STARTS)
    worker = await start("-c", WORKER, str(workshop.folder / "code.py"), str(workshop.folder / "model"))
    pids = workshop.folder / "pids"
    await until(lambda: len(read_pids(pids)) == 2, within_s=60)
    assert all(alive(pid) for pid in read_pids(pids))
    worker.kill()
    await until(lambda: not any(alive(pid) for pid in read_pids(pids)))


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
