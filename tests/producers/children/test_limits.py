"""Time in user code is limited: what hangs ends as `timeout`, its group and its neighbours go on. Waiting is not user code's time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import EngineError, EngineUnavailable
from streamrl.producers.children.calls import Limits
from streamrl.producers.repeats import REFUSALS
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.policies import script, serve_logits
from tests.support.processes import alive, until
from tests.support.user_code import Workshop, ends

pytestmark = pytest.mark.process

SHORT = Limits(idle_s=1.5, total_s=60.0, answer_s=1.5)
HANGS = """
{kind} hangs(task, engine):
    chat = engine.chat(task)
    {wait}chat.generate()
    if me(task, engine) == (1, 1):
        tell("hung")
        {line}
    return chat.episode()
"""


@pytest.mark.parametrize(
    ("kind", "line", "num_hung"),
    [
        ("async def", "await asyncio.sleep(3600)", 1),
        # Among others first, whose process is killed; then alone.
        ("async def", "time.sleep(3600)", 2),
        # It holds the interpreter itself, so that nothing in the process can say who it is: a third time by itself.
        pytest.param("async def", "import re; re.match('(a+)+$', 'a' * 60 + 'b')", 3, marks=pytest.mark.slow),
        ("async def", "while True:\n            try: await asyncio.sleep(3600)\n            except BaseException: pass", 1),
        ("def", "time.sleep(3600)", 1),
        pytest.param("def", "while True: pass", 1, marks=pytest.mark.slow),
    ],
)
async def test_what_hangs_ends_alone(workshop: Workshop, kind: str, line: str, num_hung: int) -> None:
    code = HANGS.format(kind=kind, wait="await " if "async" in kind else "", line=line)
    # Among others a held loop is noticed long before the limit of what holds it.
    limits = Limits(idle_s=4.0, total_s=60.0, answer_s=1.5) if num_hung > 1 else SHORT
    async with workshop.runner(code, producer="hangs", limits=limits) as runner:
        groups = await workshop.run(runner, *(workshop.task(index) for index in range(3)))
        [after] = await workshop.run(runner, workshop.task(9))
    assert [ends(group) for group in (groups[0], groups[2], after)] == [{0: "episode", 1: "episode", 2: "episode"}] * 3
    found = ends(groups[1])
    assert (found[0], found[2]) == ("episode", "episode")
    assert found[1].startswith(f"timeout: {limits.idle_s:g} s")
    assert len(workshop.told("hung")) == num_hung


@pytest.mark.parametrize(
    "line", ["time.sleep(3600)", pytest.param("import re; re.match('(a+)+$', 'a' * 60 + 'b')", marks=pytest.mark.slow)]
)
async def test_a_task_that_a_rollout_leaves_behind_stops_nobody(workshop: Workshop, line: str) -> None:
    """It is no call any more when it holds the loop, so no limit of a call ends it; not where its task is alone either."""
    code = f"""
async def late():
    await asyncio.sleep(0.3)
    tell("late")
    {line}

async def leaves(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    if me(task, engine) == (1, 1):
        asyncio.get_running_loop().keep = asyncio.create_task(late())
        return chat.episode()
    await asyncio.sleep(1.0)
    return chat.episode()
"""
    limits = Limits(idle_s=20.0, total_s=60.0, answer_s=1.5)
    groups = await workshop.played(code, *(workshop.task(index) for index in range(3)), producer="leaves", limits=limits)
    assert [ends(group) for group in groups] == [{0: "episode", 1: "episode", 2: "episode"}] * 3
    assert len(workshop.told("late")) >= 1


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(idle_s=60.0, total_s=60.0, max_calls=5), "timeout: 6 engine calls (producer.max_calls)"),
        (Limits(idle_s=60.0, total_s=60.0, max_tokens=9), "tokens that engines have made for it (producer.max_tokens)"),
    ],
)
@pytest.mark.parametrize("producer", ["endless", "Group"])
async def test_an_agent_that_asks_without_end_is_ended(workshop: Workshop, limits: Limits, said: str, producer: str) -> None:
    """Each of its calls is answered, so that none of them is too long."""
    code = """
async def endless(task, engine):
    chat = engine.chat(task)
    while me(task, engine) == (1, 1):
        await engine.chat(task).generate()
    for _ in range(3):
        await engine.chat(task).generate()
    return await good(task, engine)


class Group:
    async def rollout(self, task, context):
        from streamrl.producers.functions import FunctionProducer
        return await FunctionProducer(endless).rollout(task, context)
"""
    neighbour, group = await workshop.played(code, workshop.task(0), workshop.task(1), producer=producer, limits=limits)
    episodes = {0: "episode", 1: "episode", 2: "episode"}
    found = ends(group)
    assert ends(neighbour) == episodes
    assert found[1].startswith("timeout: ")
    if producer == "endless":
        assert said in found[1] and found | {1: "episode"} == episodes


@pytest.mark.parametrize(
    ("made", "more", "limits", "reason"),
    [
        ("engine.chat(task)", "", Limits(idle_s=60.0, total_s=1.0), "timeout: 1 s of user code"),
        ("chat", "max_new_tokens=0", Limits(idle_s=0.5, total_s=60.0), "timeout"),  # one without room
    ],
)
async def test_what_asks_engines_for_ever_ends(workshop: Workshop, made: str, more: str, limits: Limits, reason: str) -> None:
    code = f"""
async def endless(task, engine):
    chat = engine.chat(task)
    while True:
        await {made}.generate({more})
        await asyncio.sleep(0.05 if {not more} else 0)
"""
    [group] = await workshop.played(code, workshop.task(num_rollouts=1), producer="endless", limits=limits)
    assert ends(group)[0].startswith(reason)


async def test_the_clock_stands_while_a_rollout_waits_for_a_version(workshop: Workshop) -> None:
    async with workshop.runner("", producer="good", limits=Limits(idle_s=2.0, total_s=2.0)) as runner:
        rolling = asyncio.create_task(runner.run(workshop.task(min_version=1)))
        await asyncio.sleep(3)
        assert not rolling.done()
        engine = workshop.engine
        assert isinstance(engine, TableEngine)
        await serve_logits(engine, script(workshop.tokenizer, {(0, "<|assistant|>"): "7"}), Version(0, 1))
        group = await rolling
    assert ends(group) == {0: "episode", 1: "episode", 2: "episode"}
    assert {span.version for episode in group.episodes for span in episode.segments[1].spans} == {Version(0, 1)}


async def test_time_in_which_the_watcher_stood_still_is_nobodys(workshop: Workshop) -> None:
    code = """
async def naps(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    tell("naps")
    await asyncio.sleep(0.3)
    return chat.episode()
"""
    async with workshop.runner(code, producer="naps", limits=Limits(idle_s=2.5, total_s=60.0)) as runner:
        rolling = asyncio.create_task(runner.run(workshop.task(num_rollouts=1)))
        await until(lambda: bool(workshop.told("naps")))
        # What SIGSTOP does to this process: nothing runs in it, and then everything is late.
        time.sleep(4)  # noqa: ASYNC251
        assert ends(await rolling) == {0: "episode"}


async def test_a_child_that_is_stopped_is_replaced(workshop: Workshop) -> None:
    code = """
async def once(task, engine):
    chat = engine.chat(task)
    turn = chat.turns[-1] if chat.turns else await chat.generate()
    tell("ran", engine.context.rollout_index)
    while not (FOLDER / "go-on").exists():
        await asyncio.sleep(0.02)
    return chat.episode()
"""
    async with workshop.runner(code, producer="once", limits=Limits(idle_s=30.0, total_s=60.0, answer_s=3.0)) as runner:
        rolling = asyncio.create_task(runner.run(workshop.task(num_rollouts=2)))
        await until(lambda: len(workshop.told("ran")) >= 2)
        os.kill(int(workshop.told("ran")[0][0]), signal.SIGSTOP)
        (workshop.folder / "go-on").touch()
        assert ends(await rolling) == {0: "episode", 1: "episode"}
    assert len({pid for pid, *_ in workshop.told("ran")}) == 2


async def test_a_blocking_call_is_named_with_file_and_line(workshop: Workshop) -> None:
    code = """
async def blocks(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    time.sleep(0.05)  # here
    return chat.episode()
"""
    async with workshop.runner(code, producer="blocks") as runner:
        line = next(n for n, text in enumerate((workshop.folder / "code.py").read_text().splitlines(), 1) if "# here" in text)
        async with asyncio.timeout(30):
            while not runner.notice:
                await workshop.run(runner, *(workshop.task(index, num_rollouts=8) for index in range(4)))
        assert f"code.py:{line} in blocks" in runner.notice


class Fragile:
    """An engine whose first answers to rollout 1, `times` of them, are errors."""

    def __init__(self, engine: TableEngine, error: type[EngineError], times: int) -> None:
        self._engine = engine
        self._error = error
        self.left = times

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if ".1-" in request.request_id and self.left:
            self.left -= 1
            raise self._error("the engine has a bad day")
        async for chunk in self._engine.generate(request):
            yield chunk


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("error", [EngineUnavailable, EngineError])
async def test_an_engines_failure_repeats_its_rollout_alone(workshop: Workshop, error: type[EngineError]) -> None:
    code = """
async def counted(task, engine):
    tell("ran", engine.context.rollout_index)
    return await good(task, engine)
"""
    workshop.engine = Fragile(workshop.engine, error, 2)  # type: ignore[assignment, arg-type]
    [group] = await workshop.played(code, workshop.task(), producer="counted")
    assert ends(group) == {0: "episode", 1: "episode", 2: "episode"}
    assert sorted(rollout for _, rollout in workshop.told("ran")) == ["0", "1", "1", "1", "2"]
    if error is EngineUnavailable:  # engines that stay away give the task back
        workshop.engine.left = 1000  # type: ignore[attr-defined]
        with raises(EngineUnavailable):
            await workshop.played("", workshop.task(), producer="good")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("producer", ["good", ""])
async def test_what_engines_refuse_again_and_again_has_failed(workshop: Workshop, producer: str) -> None:
    class Refuses(Fragile):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            self.left -= 1
            raise EngineError("too long")
            yield

    workshop.engine = engine = Refuses(workshop.engine, EngineError, 0)  # type: ignore[assignment, arg-type]
    [group] = await workshop.played("def one(task, episode): return 1.0", workshop.task(num_rollouts=1), producer=producer, reward="one")
    assert ends(group) == {0: "failed: engine: too long"}
    assert engine.left == -REFUSALS


async def test_many_short_blocks_are_slow_and_kill_nothing(workshop: Workshop) -> None:
    """The loop does not turn for longer than it may be held, but nobody holds it for long."""
    code = """
async def blocks(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    tell("ran")
    time.sleep(0.1)
    return chat.episode()
"""
    groups = await workshop.played(
        code,
        *(workshop.task(index, num_rollouts=10) for index in range(6)),
        producer="blocks",
        limits=Limits(idle_s=5.0, total_s=60.0, answer_s=3.0),
    )
    assert [len(group.episodes) for group in groups] == [10] * 6
    assert len({pid for pid, *_ in workshop.told("ran")}) == 1


async def test_a_call_that_outlives_its_task_is_ended(workshop: Workshop) -> None:
    code = """
def outlives(task, engine):
    chat = engine.chat(task)
    chat.generate()
    if task.index == 1:
        tell("hung")
        time.sleep(3600)
    while not (FOLDER / "go-on").exists():
        time.sleep(0.02)
    return chat.episode()
"""
    async with workshop.runner(code, producer="outlives", limits=Limits(idle_s=60.0, total_s=60.0, answer_s=1.0)) as runner:
        neighbour = asyncio.create_task(runner.run(workshop.task(0)))
        given_back = asyncio.create_task(runner.run(workshop.task(1, num_rollouts=1)))
        await until(lambda: bool(workshop.told("hung")))
        given_back.cancel()
        await until(lambda: not alive(int(workshop.told("hung")[0][0])))
        (workshop.folder / "go-on").touch()
        assert ends(await neighbour) == {0: "episode", 1: "episode", 2: "episode"}


async def test_time_in_which_a_program_waits_for_a_slot_is_nobodys_and_no_progress(workshop: Workshop) -> None:
    code = """
import asyncio, threading
from streamrl.sandbox.sandbox import Sandbox

sandbox = Sandbox(slots=1)
free = threading.Event()
holds = asyncio.Event()

async def waits(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    if engine.context.rollout_index > 0:
        await holds.wait()
    if engine.context.rollout_index == 1:
        await sandbox.run(["/bin/true"])
        return chat.episode()
    if engine.context.rollout_index == 2:
        given_up = asyncio.create_task(sandbox.run(["/bin/true"]))
        await asyncio.sleep(0.1)
        given_up.cancel()
        await asyncio.sleep(600)
    sandbox._threads.submit(free.wait)
    holds.set()
    for _ in range(8):
        await asyncio.sleep(0.5)
        await engine.context.engine.info()
    free.set()
    return chat.episode()
"""
    async with workshop.runner(code, producer="waits", limits=Limits(idle_s=2.5, total_s=60.0)) as runner:
        group = await runner.run(workshop.task(num_rollouts=3))
    found = ends(group)
    assert (found[0], found[1]) == ("episode", "episode")
    assert found[2].startswith("timeout: 2.5 s"), "a program that was given up waits no longer"
