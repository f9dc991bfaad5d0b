"""Runs that cannot get on: each says what it waits for, or why it ends."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.data.model import ensure_model
from streamrl.errors import StreamFull
from streamrl.launch.prepare import prepare
from streamrl.monitor.follow import Follower
from streamrl.monitor.numbers import RunNumbers
from streamrl.monitor.numbers import Standing as Wait
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import Watch
from streamrl.runtime.run_record import write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import encode
from streamrl.schemas.control import Position, WorkerPresence
from streamrl.schemas.subjects import PREFIX_POSITIONS, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from tests.support.digits import TABLE, write_digits
from tests.support.harness import make_run, services
from tests.support.processes import until
from tests.support.programs import STREAMRL, Start, answer, said
from tests.support.world.world import table_config

CODE = """
import asyncio


async def fails(task, engine):
    raise ValueError(f"no tool for {task.prompt}")


async def hangs(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    await asyncio.sleep(600)
"""
COLD = ("--set", "warmup.max_steps=0", "--set", "data.heldout=")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_digits(tmp_path, TABLE)
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


@pytest.fixture
def run(place: Path) -> RunDir:
    return RunDir(place / "runs" / "digits")


@pytest.fixture
def streamrl(start: Start) -> Start:
    return partial(start, *STREAMRL)


def sets(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


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
    code, out, err = await said(await streamrl("up", "run.toml", "--plain", *COLD, *sets(*keys)))
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
    process = await streamrl("up", "run.toml", "--plain", *COLD, *sets(*keys, "run.steps=100000"))
    await line_with(process, "training")
    said_by_guest = place / "guest.txt"
    with said_by_guest.open("w") as file:  # it says more than a pipe holds
        guest = await streamrl("attach", "mine.py:fails", "--run", "digits", stdout=file, stderr=file)
    assert "all by producer-1. hint: " in await line_with(process, "tasks have failed since")
    before = json.loads(run.state_path.read_text())["step"]
    await until(lambda: json.loads(run.state_path.read_text())["step"] > before + 3, within_s=90)
    status = await answer(await streamrl("status", "digits", "--json"))
    failed = {one["worker"]: one["failed_rollouts"] for one in status["numbers"]["workers"]}
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
    """A tap that holds the stream from its first message on, and what fills it: nobody can free any room."""
    async with standing_run(tmp_path, ALL, bus={"samples_bytes": 300_000}) as run:
        await until(lambda: run.numbers().step > 1, within_s=60)
        subjects, position = Subjects("stands"), Position(reader="tap", stream=SAMPLES, oldest_needed=1, version=Version(0, 0))
        await run.bus.kv.put(f"{PREFIX_POSITIONS}tap", encode(position))
        for size in (1 << 16, 1 << 12, 1 << 8):
            with contextlib.suppress(StreamFull):
                while True:
                    await run.bus.publish(subjects.samples("main"), bytes(size))
        found = await run.wait_of("room on a full stream, for which producer-0")
    assert "docs/operations.md" in found.hint


@pytest.mark.nats
@pytest.mark.slow
async def test_a_run_that_goes_on_says_so_and_one_that_was_killed_is_interrupted(streamrl: Start, run: RunDir, place: Path) -> None:
    process = await streamrl(
        "up", "run.toml", "--plain", *COLD, *sets("engine.workers=0", "run.steps=100000", "tasks.drop_zero_variance=false")
    )
    line = await line_with(process, "nothing moves since")
    status = await answer(await streamrl("status", "digits", "--json"))
    standing = status["numbers"]["standing"]
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
