"""User code does what it likes: its rollout ends and says why, the worker and everybody else go on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streamrl.errors import ConfigError
from streamrl.producers.children.calls import Limits
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
    return await good(task, engine)
"""
    [group] = await workshop.played(code, workshop.task(num_rollouts=4), producer="asks")
    found = ends(group)
    assert found[3] == "episode"
    assert all(found[rollout].startswith("failed: ") and "cannot be handed over" in found[rollout] for rollout in (0, 1, 2))


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
