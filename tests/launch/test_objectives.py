"""Objectives of real runs: troubles are staged, and the cause that is named is the right one."""

import asyncio
import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.bus.protocol import Bus
from streamrl.config.slo import SloConfig
from streamrl.config.tree import Config, RunConfig, TasksConfig
from streamrl.errors import StreamFull
from streamrl.launch.objectives import Objectives, Webhook
from streamrl.monitor.numbers import Finding
from streamrl.monitor.series import TRAINED, Series
from streamrl.monitor.slo import findings_of
from streamrl.monitor.view import RunView
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import connected
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant, Position
from streamrl.schemas.events import SLO_EVENT, Event
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import EVENTS, PREFIX_POSITIONS, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from tests.support.digits import TABLE, write_digits
from tests.support.processes import until, worker_pid
from tests.support.programs import STREAMRL, Start, answer, said

pytestmark = pytest.mark.timeout(400)
AGAIN = pytest.mark.soak
"""A trouble whose cause tests/monitor/test_slo.py finds in the signs of such runs."""

CODE = """
import asyncio
import random


async def some_hang(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    if random.random() < 0.1:
        await asyncio.sleep(600)
    return chat.episode()


def equal(task, episode):
    return 1.0


async def slow(task, episode):
    await asyncio.sleep(0.5)
    return random.random()


async def slow_and_equal(task, episode):
    await asyncio.sleep(0.5)
    return 1.0
"""
EAGER = (
    *("slo.hold_s=2", "metrics.window_s=2", "run.steps=1000000", "supervise.silent_s=600", "data.heldout=", "warmup.max_steps=0"),
    *("tasks.drop_zero_variance=false", "tasks.max_staleness=4", "supervise.max_failed_batches=0", "supervise.max_failed_share=1"),
)
"""Objectives are judged within seconds; nothing ends the run, and rewards that are all equal keep it from nothing."""
_LOOK_S, _LOOKS = 0.2, 50
"""Between two looks, and how many there are at least: five windows."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_digits(tmp_path, TABLE)
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


@pytest.fixture
def run(place: Path) -> RunDir:
    return RunDir(place / "runs" / "digits")


def sets(keys: Iterable[str]) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


@contextlib.asynccontextmanager
async def a_run(start: Start, run: RunDir, *keys: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A run that is up, and is ended in order."""
    process = await start(*STREAMRL, "up", "run.toml", "--plain", *sets((*EAGER, *keys)), stdout=asyncio.subprocess.DEVNULL)
    try:
        await until(lambda: run.state_path.exists() and run.role_path("reader").exists(), within_s=90)
        yield process
    finally:
        for _ in range(2):  # the second signal ends what does not drain
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 30)


async def finding(run: RunDir, objective: str, causes: set[str], *, within_s: float = 240.0) -> Finding:
    """The finding on an objective whose first causes are all of these, once that has been found for most of the time that it was not met.

    What is named before, because little is known yet, counts against it. Fails with what was found instead.
    """
    seen: list[Finding] = []
    unmet: list[Finding] = []
    looks: list[bool] = []

    async def follow(bus: Bus) -> None:
        async for message in bus.read(EVENTS, after=0, subject=Subjects("digits").events(SLO_EVENT)):
            found = findings_of(decode(message.body, Event))
            seen.extend(found)
            unmet[:] = [one for one in found if one.objective == objective]

    try:
        async with asyncio.timeout(within_s), connected(run, role="reader", patience_s=30) as bus:
            following = asyncio.create_task(follow(bus))
            try:
                while not (len(looks) >= _LOOKS and looks[-1] and sum(looks) > len(looks) / 2):
                    if following.done():
                        raise AssertionError("the events ended") from following.exception()
                    await asyncio.sleep(_LOOK_S)
                    looks += [causes <= {cause.name for cause in one.causes[: len(causes)]} for one in unmet]
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            return unmet[0]
    except TimeoutError:
        told = [(one.objective, str(one.level), round(one.value, 2), [cause.name for cause in one.causes]) for one in seen]
        part = f"{sum(looks)} of {len(looks)} looks"
        raise AssertionError(f"{objective}: {causes} was found at {part}, every {_LOOK_S:g} s, of {told}") from None


@contextlib.contextmanager
def halting(pid: Callable[[], int | None], *, part: float) -> Generator[None]:
    """Stop a process for this part of every half second."""
    over = threading.Event()

    def halt() -> None:
        while not over.is_set():
            number = pid()
            for one, wait_s in ((signal.SIGSTOP, 0.5 * part), (signal.SIGCONT, 0.5 * (1 - part))):
                with contextlib.suppress(ProcessLookupError):
                    if number is not None:
                        os.kill(number, one)
                over.wait(wait_s)
        if (number := pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


STARVED = "slo.starvation=0.3"
VAIN = ("tasks.drop_zero_variance=true",)
SATURATED = ("engine.slots=2", "producer.concurrency=32")
ONE_SLOT = ("producer.concurrency=1", "engine.slots=64")
HANG = ("producer.function=mine.py:some_hang", "producer.idle_timeout_s=9")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "objective", "cause"),
    [
        pytest.param((STARVED, *SATURATED, "debug.token_delay_s=0.02"), "starvation", "slow_engine", marks=AGAIN),
        ((STARVED, *ONE_SLOT, "debug.token_delay_s=0.02"), "starvation", "few_producers"),
        pytest.param((STARVED, *HANG), "starvation", "hung_tool", marks=AGAIN),
        ((STARVED, "reward.kind=mine.py:slow"), "starvation", "slow_reward"),
        pytest.param(("slo.drop_rate=0.5", "reward.kind=mine.py:equal", *VAIN), "drop_rate", "zero_variance", marks=AGAIN),
        pytest.param(
            (STARVED, "reward.kind=mine.py:equal", *VAIN, *ONE_SLOT, "debug.token_delay_s=0.02"), "starvation", "zero_variance", marks=AGAIN
        ),
    ],
)
async def test_the_cause_of_a_staged_trouble_is_named(start: Start, run: RunDir, keys: tuple[str, ...], objective: str, cause: str) -> None:
    async with a_run(start, run, *keys):
        await finding(run, objective, {cause})


@AGAIN
async def test_one_sick_engine_of_several_is_named(start: Start, run: RunDir) -> None:
    keys = ("slo.starvation=0.3", "engine.workers=3", "engine.slots=4", "producer.concurrency=32", "debug.token_delay_s=0.01")
    async with a_run(start, run, *keys):
        with halting(lambda: worker_pid(run, "engine", 1), part=0.9):
            one = await finding(run, "starvation", {"sick_engine"})
        assert "engine-1" in one.causes[0].what


@pytest.mark.slow
async def test_a_slow_trainer_is_named(start: Start, run: RunDir) -> None:
    async with a_run(start, run, "slo.stream_lag_s=0.2", "tasks.max_staleness=16"):
        with halting(lambda: worker_pid(run, "trainer"), part=0.95):
            await finding(run, "stream_lag_s", {"slow_trainer"})


@pytest.mark.slow
async def test_a_full_stream_is_named(start: Start, run: RunDir) -> None:
    async with a_run(start, run, "slo.no_progress_s=5", "bus.samples_bytes=33554432") as process:
        assert process.returncode is None
        async with connected(run, patience_s=60) as bus:
            position = Position(reader="tap", stream=SAMPLES, oldest_needed=1, version=Version(0, 0))
            await bus.kv.put(f"{PREFIX_POSITIONS}tap", encode(position))
            for size in (7 << 20, 1 << 20, 1 << 8):
                with contextlib.suppress(StreamFull):
                    while True:
                        await bus.publish(Subjects("digits").samples("main"), bytes(size))
        await finding(run, "no_progress_s", {"full_stream"})


@AGAIN
@pytest.mark.parametrize(
    ("keys", "causes"),
    [
        (("reward.kind=mine.py:equal", *VAIN, *SATURATED, "debug.token_delay_s=0.02"), {"zero_variance", "slow_engine"}),
        (("reward.kind=mine.py:slow_and_equal", *VAIN), {"zero_variance", "slow_reward"}),
        ((*HANG, *SATURATED, "debug.token_delay_s=0.05"), {"hung_tool", "slow_engine"}),
        ((*HANG, "reward.kind=mine.py:equal", *VAIN), {"hung_tool", "zero_variance"}),
    ],
)
async def test_of_two_troubles_at_once_both_are_named(start: Start, run: RunDir, keys: tuple[str, ...], causes: set[str]) -> None:
    async with a_run(start, run, STARVED, *keys):
        await finding(run, "starvation", causes)


@AGAIN
async def test_a_sick_engine_and_rewards_that_are_all_equal_are_both_named(start: Start, run: RunDir) -> None:
    keys = (STARVED, "engine.workers=3", "engine.slots=4", "producer.concurrency=32", "debug.token_delay_s=0.05")
    async with a_run(start, run, *keys, *VAIN, "reward.kind=mine.py:equal"):
        with halting(lambda: worker_pid(run, "engine", 1), part=0.9):
            await finding(run, "starvation", {"zero_variance", "sick_engine"})


class Hook:
    """A server that keeps what it is sent."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.got.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def hook() -> Generator[Hook]:
    hook = Hook()
    yield hook
    hook.close()


@pytest.mark.slow
async def test_a_breach_is_told_everywhere(start: Start, run: RunDir, hook: Hook) -> None:
    streamrl = partial(start, *STREAMRL)
    async with a_run(start, run, f"slo.webhook={hook.url}", STARVED, "producer.concurrency=1", "debug.token_delay_s=0.05") as process:
        await finding(run, "starvation", {"few_producers"})
        await until(lambda: any(b'"few_producers"' in body for body in hook.got), within_s=30)
        assert msgspec.json.decode(hook.got[0])["run"] == "digits"
        (one, *_) = (await answer(await streamrl("status", "digits", "--json")))["numbers"]["slo"]
        assert one["objective"] == "starvation"
        assert "raise producer.concurrency" in (await said(await streamrl("status", "digits")))[1]
        assert "  slo " in (await said(await streamrl("top", "digits", "--once")))[1].splitlines()[0]
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 60)
    assert msgspec.json.decode(run.summary_path.read_bytes())["slo"]["starvation"] in ("warn", "breach")


async def test_a_breach_and_its_end_are_noted_reported_and_posted(hook: Hook) -> None:
    """Tasks that are lost, which are not blamed on a return of None."""
    view, said, told = RunView("demo"), list[str](), list[dict[str, Any]]()
    for task in range(12):
        view.tombstone(1 + task, Tombstone(task=task, reason="lost", group_size=2, source="main"))
    view.grant(Grant(granted=24, version=0, retired=12))
    config = Config(run=RunConfig(name="demo"), tasks=TasksConfig(batch_tasks=1), slo=SloConfig(hold_s=0.0, webhook=hook.url))
    objectives = Objectives(config, said.append, told.append)
    objectives.look(view, view.numbers(elapsed_s=1.0), now_s=1.0, over=False)
    (line,) = said
    assert "slo.drop_rate" in line and "end as lost" in line and "None" not in line
    (found,) = findings_of(Event(kind=SLO_EVENT, worker="supervisor", detail=told[0]))
    assert (found.objective, found.causes[0].name) == ("drop_rate", "lost_tasks")
    series = Series()
    series.decided = Counter({TRAINED: 12})
    healthy = RunView("demo", series=series)
    objectives.look(healthy, healthy.numbers(elapsed_s=2.0), now_s=2.0, over=False)
    assert len(said) == 2 and said[1].startswith("ok: ") and findings_of(Event(kind=SLO_EVENT, worker="supervisor", detail=told[1])) == ()
    await asyncio.to_thread(objectives.close)
    for body, detail in zip(hook.got, told, strict=True):
        posted = msgspec.json.decode(body)
        assert posted == {"run": "demo", "time_s": posted["time_s"], **msgspec.json.decode(msgspec.json.encode(detail))}


def test_a_webhook_that_is_dead_or_slow_keeps_nobody_waiting(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    dead = Webhook("http://127.0.0.1:9/secret", timeout_s=1.0)
    for number in range(40):
        dead.send({"number": number})
    dead.close()
    assert "secret" not in caplog.text and "host=127.0.0.1:9" in caplog.text
    live = Webhook(hook.url, timeout_s=10.0)
    live.send({"a": 1})
    live.close()
    assert hook.got == [b'{"a":1}']
