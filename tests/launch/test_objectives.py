"""A run in trouble names the right cause, and one that cannot get on says why."""

import asyncio
import contextlib
import io
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.config.metrics import SloConfig
from streamrl.config.tree import Config, RunConfig, TasksConfig
from streamrl.data.model import ensure_model
from streamrl.errors import StreamFull
from streamrl.launch import shown
from streamrl.launch.objectives import Objectives, Webhook
from streamrl.launch.prepare import prepare
from streamrl.launch.shown import Shown
from streamrl.monitor.decoded import LedgerLine
from streamrl.monitor.follow import Follower
from streamrl.monitor.numbers import Finding, RunNumbers
from streamrl.monitor.numbers import Standing as Wait
from streamrl.monitor.screen import PlainLines
from streamrl.monitor.series import TRAINED, Series
from streamrl.monitor.slo import findings_of
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import Watch
from streamrl.runtime.run_record import write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker, connected
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant, Position, WorkerPresence
from streamrl.schemas.events import FAILURES_EVENT, SLO_EVENT, Event
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import EVENTS, PREFIX_POSITIONS, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from tests.launch.conftest import Hook
from tests.support.digits import TABLE, write_digits
from tests.support.harness import make_run, services
from tests.support.ledgers import entry
from tests.support.looked_at import sets
from tests.support.processes import until, worker_pid
from tests.support.programs import STREAMRL, Start, answer, said
from tests.support.world.world import table_config

pytestmark = pytest.mark.timeout(400)

CODE = """
import asyncio
import random


async def fails(task, engine):
    raise ValueError(f"no tool for {task.prompt}")


async def hangs(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    await asyncio.sleep(600)


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


@contextlib.asynccontextmanager
async def a_run(start: Start, run: RunDir, *keys: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A run that is up, and is ended in order."""
    process = await start(*STREAMRL, "up", "run.toml", "--plain", *sets(*EAGER, *keys), stdout=asyncio.subprocess.DEVNULL)
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
def halting(run: RunDir, kind: str, index: int, part: float) -> Generator[None]:
    """Stop a worker for this part of every half second."""
    over = threading.Event()

    def halt() -> None:
        while not over.is_set():
            number = worker_pid(run, kind, index)
            for one, wait_s in ((signal.SIGSTOP, 0.5 * part), (signal.SIGCONT, 0.5 * (1 - part))):
                with contextlib.suppress(ProcessLookupError):
                    if number is not None:
                        os.kill(number, one)
                over.wait(wait_s)
        if (number := worker_pid(run, kind, index)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def fill(bus: Bus, run: str, *sizes: int) -> None:
    """Hold the stream as a tap does, from its first message on, and fill it with messages of these sizes: nobody can free any room."""
    position = Position(reader="tap", stream=SAMPLES, oldest_needed=1, version=Version(0, 0))
    await bus.kv.put(f"{PREFIX_POSITIONS}tap", encode(position))
    for size in sizes:
        with contextlib.suppress(StreamFull):
            while True:
                await bus.publish(Subjects(run).samples("main"), bytes(size))


class Trouble(NamedTuple):
    """What a run is given, whom of it is stopped for a part of its time, and what must be named then."""

    keys: tuple[str, ...]
    causes: set[str]
    objective: str = "starvation"
    halted: tuple[str, int, float] | None = None
    """Kind and index of the worker, and the part of its time."""
    named: str = ""
    """Stands in what is said of the first cause."""


STARVED = "slo.starvation=0.3"
VAIN = ("tasks.drop_zero_variance=true",)
EQUAL = ("reward.kind=mine.py:equal", *VAIN)
SATURATED = ("engine.slots=2", "producer.concurrency=32", "debug.token_delay_s=0.02")
ONE_SLOT = ("producer.concurrency=1", "engine.slots=64", "debug.token_delay_s=0.02")
HANG = ("producer.function=mine.py:some_hang", "producer.idle_timeout_s=9")
THREE = ("engine.workers=3", "engine.slots=4", "producer.concurrency=32")
SICK = ("engine", 1, 0.9)
BEHIND = ("slo.stream_lag_s=0.2", "tasks.max_staleness=16")
TROUBLES = {
    "few producers": Trouble(ONE_SLOT, {"few_producers"}),
    "slow reward": Trouble(("reward.kind=mine.py:slow",), {"slow_reward"}),
    "slow trainer": Trouble(BEHIND, {"slow_trainer"}, "stream_lag_s", ("trainer", 0, 0.95)),
}
OTHERS = {
    "slow engine": Trouble(SATURATED, {"slow_engine"}),
    "hung tool": Trouble(HANG, {"hung_tool"}),
    "equal rewards": Trouble(("slo.drop_rate=0.5", *EQUAL), {"zero_variance"}, "drop_rate"),
    "equal rewards starve": Trouble((*EQUAL, *ONE_SLOT), {"zero_variance"}),
    "sick engine": Trouble((*THREE, "debug.token_delay_s=0.01"), {"sick_engine"}, halted=SICK, named="engine-1"),
    "sick engine, equal rewards": Trouble((*THREE, *EQUAL, "debug.token_delay_s=0.05"), {"sick_engine", "zero_variance"}, halted=SICK),
    "slow engine, equal rewards": Trouble((*EQUAL, *SATURATED), {"zero_variance", "slow_engine"}),
    "slow and equal rewards": Trouble(("reward.kind=mine.py:slow_and_equal", *VAIN), {"zero_variance", "slow_reward"}),
    "hung tool, slow engine": Trouble((*HANG, *SATURATED, "debug.token_delay_s=0.05"), {"hung_tool", "slow_engine"}),
    "hung tool, equal rewards": Trouble((*HANG, *EQUAL), {"hung_tool", "zero_variance"}),
}
"""Their causes are found by tests/monitor/test_slo.py in the signs of such runs."""


@pytest.mark.parametrize(
    "given",
    [
        *(pytest.param(one, id=name, marks=pytest.mark.slow) for name, one in TROUBLES.items()),
        *(pytest.param(one, id=name, marks=pytest.mark.soak) for name, one in OTHERS.items()),
    ],
)
async def test_the_causes_of_a_staged_trouble_are_named(start: Start, run: RunDir, given: Trouble) -> None:
    async with a_run(start, run, STARVED, *given.keys):
        with contextlib.nullcontext() if given.halted is None else halting(run, *given.halted):
            found = await finding(run, given.objective, given.causes)
    assert given.named in found.causes[0].what


@pytest.mark.slow
async def test_a_full_stream_is_named(start: Start, run: RunDir) -> None:
    async with a_run(start, run, "slo.no_progress_s=5", "bus.samples_bytes=33554432") as process:
        assert process.returncode is None
        async with connected(run, patience_s=60) as bus:
            await fill(bus, "digits", 7 << 20, 1 << 20, 1 << 8)
        await finding(run, "no_progress_s", {"full_stream"})


@pytest.mark.slow
async def test_a_breach_is_told_everywhere(start: Start, run: RunDir, hook: Hook) -> None:
    streamrl = partial(start, *STREAMRL)
    async with a_run(
        start, run, f"slo.webhook={hook.url}", "slo.starvation=0.3", "producer.concurrency=1", "debug.token_delay_s=0.05"
    ) as process:
        await finding(run, "starvation", {"few_producers"})
        await until(lambda: any(b'"few_producers"' in body for body in hook.got), within_s=30)
        assert msgspec.json.decode(hook.got[0])["run"] == "digits"
        (one, *_) = (await answer(await streamrl("status", "digits", "--json")))["slo"]
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


async def test_tasks_that_failed_between_two_looks_are_said_though_a_batch_was_trained_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that fails at once, and leaves for it, may be gone before the next look."""
    monkeypatch.setattr(shown, "_SHOW_S", 0.01)
    run, bus, view, out = RunDir(tmp_path / "demo"), MemoryBus("demo", Config().bus), RunView("demo"), io.StringIO()
    run.create()
    view.worker("producer-0", WorkerPresence(worker="producer-0", kind="producer", state="running"))
    for task in range(3):
        stone = Tombstone(task=task, reason="failed", group_size=2, source="main", detail="no tool", producer="producer-1")
        view.tombstone(1 + task, stone)
    view.ledger(decode(encode(entry(cursor=9)), LedgerLine))
    screen = Shown(Config(), run, PlainLines(out), lambda: None)
    showing = asyncio.create_task(screen.follow(bus, view, Follower(bus, view), dict))
    told = await anext(aiter(bus.read(EVENTS, after=0, subject=Subjects("demo").events(FAILURES_EVENT))))
    assert decode(told.body, Event).detail == {"tasks": 3, "rollouts": {"failed": 6}, "newest": "failed: no tool"}
    assert all(part in out.getvalue() for part in ("3 tasks", "failed: no tool", "all by producer-1"))
    assert not view.failures.to_say.num_tasks
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    await screen.close()
    await bus.close()


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


COLD = ("warmup.max_steps=0", "data.heldout=")


@pytest.fixture
def streamrl(start: Start) -> Start:
    return partial(start, *STREAMRL)


async def line_with(process: asyncio.subprocess.Process, text: str, within_s: float = 120.0) -> str:
    """The first line of its output with this text; fails when it ends without one."""
    assert process.stdout is not None
    async with asyncio.timeout(within_s):
        async for line in process.stdout:
            if text in line.decode():
                return line.decode()
    raise AssertionError(f"it never said {text!r}")


@pytest.mark.nats
async def test_a_run_of_which_every_task_fails_ends_with_1_and_the_error(streamrl: Start, place: Path, run: RunDir) -> None:
    keys = ("producer.function=mine.py:fails", "producer.workers=2", "producer.concurrency=2")
    code, out, err = await said(await streamrl("up", "run.toml", "--plain", *sets(*COLD, *keys)))
    assert code == 1
    assert "(3 batches) have failed" in err and "ValueError: no tool for" in err and "\nhint: " in err
    assert "; the newest: failed: " in out
    (listed,) = await answer(await streamrl("status", "--json"))
    assert (listed["state"], listed["step"], listed["steps"]) == ("failed", 0, 15)
    assert "ValueError: no tool for" in listed["error"]
    assert "failed, 0/15 steps" in (await said(await streamrl("status", "digits")))[1]


@pytest.mark.nats
@pytest.mark.slow
async def test_a_healthy_run_goes_on_beside_an_attached_producer_that_fails_and_names_it(streamrl: Start, run: RunDir, place: Path) -> None:
    """Its own producer takes a second and a half for a rollout, in which the other one fails more tasks than end a run by itself."""
    keys = ("debug.token_delay_s=0.5", "producer.concurrency=2", "tasks.batch_tasks=2", "tasks.drop_zero_variance=false")
    process = await streamrl("up", "run.toml", "--plain", *sets(*COLD, *keys, "run.steps=100000"))
    await line_with(process, "training")
    said_by_guest = place / "guest.txt"
    with said_by_guest.open("w") as file:  # it says more than a pipe holds
        guest = await streamrl("attach", "mine.py:fails", "--run", "digits", stdout=file, stderr=file)
    assert "all by producer-1. hint: " in await line_with(process, "tasks have failed")
    before = json.loads(run.state_path.read_text())["step"]
    await until(lambda: json.loads(run.state_path.read_text())["step"] > before + 3, within_s=90)
    status = await answer(await streamrl("status", "digits", "--json"))
    failed = {one["worker"]: one["failed_rollouts"] for one in status["workers"]}
    failed.pop("producer-1", None)  # it may have left
    assert failed and not any(failed.values())
    assert await asyncio.wait_for(guest.wait(), 120) == 2, "it leaves by itself"
    assert "ValueError: no tool for" in said_by_guest.read_text().rpartition("64 tasks in a row")[2]
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 60) == 0


class Standing:
    """A run of real workers on one event loop, looked at as a supervisor does, in whose time a look takes a second."""

    def __init__(self, bus: MemoryBus, view: RunView, workers: dict[str, Worker]) -> None:
        self.bus = bus
        self._view = view
        self._workers = workers
        self._watch = Watch()
        self._looks = 0

    def numbers(self) -> RunNumbers:
        for kind, worker in self._workers.items():
            self._view.worker(worker.name, WorkerPresence(worker=worker.name, kind=kind, state=worker.state, detail=worker.detail()))
        return self._view.numbers(elapsed_s=1.0)

    async def wait_of(self, what: str) -> Wait:
        found: Wait | None = None

        def named() -> bool:
            nonlocal found
            self._looks += 1
            found = self._watch.look(self.numbers(), now_s=float(self._looks), time_s=1000.0 + self._looks, away_s=0.0)
            return found is not None and found.what.startswith(what)

        await until(named, within_s=120)
        assert found is not None
        return found


@contextlib.asynccontextmanager
async def standing_run(place: Path, kinds: Sequence[str], **sections: dict[str, object]) -> AsyncGenerator[Standing]:
    (place / "mine.py").write_text(CODE)
    given = {"run": {"name": "stands", "steps": 100_000}, "supervise": {"drain_s": 1.0}} | sections
    run, config = make_run(place, table_config(place, **given))
    ensure_model(config, run.model_dir)
    bus, view = MemoryBus(config.run.name, config.bus), RunView(config.run.name, steps=config.run.steps)
    try:
        await write_or_check(bus, await prepare(config, run))
        async with Follower(bus, view), services(config, run, bus, kinds) as workers:
            yield Standing(bus, view, workers)
    finally:
        await bus.close()


ALL = ("engine", "producer", "feeder", "trainer")


@pytest.mark.process
@pytest.mark.parametrize(
    ("kinds", "sections", "what", "hint"),
    [
        (ALL[1:], {}, "an engine: none serves a version", "streamrl worker engine"),
        (("engine", *ALL[2:]), {}, "a producer: none is there", "streamrl attach"),
        (ALL, {"reward": {"kind": "late"}}, "rewards: ", "late"),
        (ALL, {"producer": {"function": "mine.py:hangs"}}, "user code: producers hold", "hangs"),
    ],
)
async def test_what_workers_report_names_what_a_run_waits_for(
    tmp_path: Path, kinds: Sequence[str], sections: dict[str, dict[str, object]], what: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with standing_run(tmp_path, kinds, **sections) as run:
        found = await run.wait_of(what)
    assert hint in found.hint


@pytest.mark.process
async def test_a_run_whose_stream_is_full_says_so(tmp_path: Path) -> None:
    async with standing_run(tmp_path, ALL, bus={"samples_bytes": 300_000}) as run:
        await until(lambda: run.numbers().step > 1, within_s=60)
        await fill(run.bus, "stands", 1 << 16, 1 << 12, 1 << 8)
        found = await run.wait_of("room on a full stream, for which producer-0")
    assert "docs/operations.md" in found.hint


@pytest.mark.nats
@pytest.mark.slow
async def test_a_run_that_goes_on_says_so_and_one_that_was_killed_is_interrupted(streamrl: Start, run: RunDir, place: Path) -> None:
    process = await streamrl(
        "up", "run.toml", "--plain", *sets(*COLD, "engine.workers=0", "run.steps=100000", "tasks.drop_zero_variance=false")
    )
    line = await line_with(process, "nothing moves since")
    status = await answer(await streamrl("status", "digits", "--json"))
    standing = status["standing"]
    assert standing["what"].startswith("an engine: none serves") and standing["hint"] in line and "streamrl worker engine" in line
    waits = f"waits for {standing['what']}"
    assert waits in line and waits in run.events_path.read_text()
    assert waits in (await said(await streamrl("status", "digits")))[1]
    engine = await streamrl("worker", "engine", "--run", "digits")
    await line_with(process, "the run goes on")
    process.kill()
    await process.wait()
    engine.kill()
    (listed,) = await answer(await streamrl("status", "--json"))
    assert (listed["state"], listed["steps"]) == ("interrupted", 100000)
    assert json.loads(run.state_path.read_text())["state"] == "running"
    assert (await said(await streamrl("down", "digits")))[0] == 0  # frees what the killed run left in shared memory
