"""`trace` and `inspect` on a run that is up, with a reader's rights, one of whose producers was killed, and when it is over."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.protocol import Bus
from streamrl.config.load import load
from streamrl.config.tree import Config
from streamrl.launch.prepare import prepare
from streamrl.producers.rollouts import main as produce
from streamrl.runtime.bus_server import run_bus_server
from streamrl.runtime.lock import holder, lock_run
from streamrl.runtime.run_record import write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker, connected
from streamrl.schemas.codec import decode
from streamrl.schemas.events import MetricReport
from streamrl.schemas.subjects import METRICS
from tests.history.test_trace_window import check_format, named, written
from tests.support.digits import TABLE, write_digits
from tests.support.harness import make_run, read_ledger, services
from tests.support.printed import Printed
from tests.support.world.nursery import Nursery
from tests.support.world.process import Request

pytestmark = [pytest.mark.nats, pytest.mark.process]

PRODUCER = """
import asyncio
from pathlib import Path

async def mine(task, engine):
    await asyncio.sleep(0.02)  # the run waits for whoever looks at it, and not they for the processor
    seen = Path(__file__).with_name("seen")
    if (task.source, task.index) == ("main", 3) and not seen.exists():
        seen.touch()
        await asyncio.sleep(600)
    chat = engine.chat(task)
    await chat.generate()
    chat.user("1")
    await chat.generate()
    return chat.episode()
"""
REWARD = """
def mine(task, episode):
    return float(episode.completion == str(task.label)) + len(episode.turns)
"""
OPTIONS = (
    *("run.steps=100000", "tasks.drop_zero_variance=false", "tasks.batch_tasks=2", "warmup.max_steps=0", "bus.ack_wait_s=2"),
    *("producer.children=1", "reward.children=1"),
)
Say = Callable[..., Awaitable[Printed]]


@pytest.fixture
def streamrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Callable[..., Printed]) -> Say:
    """The fixture `verb` in a thread: the run goes on meanwhile."""
    monkeypatch.chdir(tmp_path)
    return partial(asyncio.to_thread, verb)


@asynccontextmanager
async def up(place: Path) -> AsyncIterator[tuple[Bus, RunDir, Config]]:
    """A run on a server of its own, supervised by this process; all but its producers are here."""
    write_digits(place, TABLE)
    (place / "mine.py").write_text(PRODUCER)
    (place / "judge.py").write_text(REWARD)
    functions = (f"reward.kind={place / 'judge.py'}:mine", f"producer.function={place / 'mine.py'}:mine")
    run, config = make_run(place / "runs", load(place / "run.toml", overrides=[*OPTIONS, *functions]))
    with lock_run(run):
        async with run_bus_server(config, run, print), connected(run) as bus:
            await write_or_check(bus, await prepare(config, run))
            async with services(config, run, bus, ["engine", "feeder", "trainer"]):
                yield bus, run, config


async def kill_once_reported(bus: Bus, nursery: Nursery, run: RunDir, task: int) -> str:
    """A producer in a process of its own, killed once it has reported that it has the task; returns its name."""
    child = asyncio.create_task(nursery.run(Request("producer", str(run.path))))
    reports = bus.read(METRICS, after=0)
    while task not in ((one := decode((await anext(reports)).body, MetricReport)).tasks or ()):
        pass
    os.kill(nursery.pid, signal.SIGKILL)
    assert await child == -signal.SIGKILL
    return one.worker


async def answer(said: Awaitable[Printed]) -> Any:
    return json.loads((await said).out)


async def test_a_run_of_two_turns_up_and_over(streamrl: Say, tmp_path: Path, children: Nursery) -> None:
    async with asyncio.timeout(150):
        async with up(tmp_path) as (bus, run, config):
            killed = await kill_once_reported(bus, children, run, 3)
            worker = Worker(config=config, run_dir=run, bus=bus, kind="producer", index=1)
            async with asyncio.TaskGroup() as group:
                producer = group.create_task(produce(worker))
                while (
                    len(await read_ledger(bus, "digits")) < 5
                    or (await answer(streamrl("trace", "digits", "3", "--json")))["state"] == "open"
                ):
                    await asyncio.sleep(0.1)
                # Take the operator's login away from who reads: what is left is the reader's.
                run.bus_path.rename(run.bus_path.with_suffix(".hidden"))
                life = await look(streamrl, tmp_path, killed)
                run.bus_path.with_suffix(".hidden").rename(run.bus_path)
                worker.draining.set()
                await producer
        assert holder(run) is None

        # It is over: the same from its store, and no engine answers.
        assert await answer(streamrl("trace", "digits", "3/1", "--json")) == life
        assert "is up" in (await streamrl("inspect", "digits", "--prompt", "7", code=1)).err


async def look(streamrl: Say, place: Path, killed: str) -> Any:
    """At everything while the run is up; returns the life of a rollout."""
    # A trained task, which a killed producer had: two turns with a message between them, each with its own times.
    life = await answer(streamrl("trace", "digits", "3/1", "--json"))
    assert life["state"] == "trained" and life["claim"]["producer"] == "producer-1" and life["claim"]["deliveries"] == 2
    assert [had["producer"] for had in life["claim"]["earlier"]] == [killed]
    [sample] = life["rollouts"][0]["samples"]
    first, second = sample["turns"]
    times = [life["claim"]["issued_s"], life["claim"]["claimed_s"], first["asked_s"], first["began_s"], first["finished_s"]]
    times += [second["asked_s"], second["began_s"], second["finished_s"], sample["scored_s"]]
    assert None not in times and times == sorted(times)
    assert second["before"] >= 1 and first["engine"].startswith("engine-0")
    text = (await streamrl("trace", "digits", "3/1")).out
    assert "turn 2" in text and "tools" in text and "not recorded" not in text
    assert f"had by    {killed}" in text and "left no record" not in text

    # The newest tasks: wherever they are, that is said.
    newest = int((await streamrl("trace", "digits", "999999", code=1)).err.partition("0 to ")[2].split()[0])
    assert newest > 3
    open_now = await answer(streamrl("trace", "digits", str(newest), "--json"))
    assert open_now["detail"] and open_now["credit"].startswith("granted after version")

    # Stored and live: the reward gives what is stored; an engine answers as it does to producers.
    shown = await answer(streamrl("inspect", "digits", "3", "--json"))
    assert [one["rollout"] for one in shown] == [0, 1, 2, 3] and all(one["reward"] >= 2 for one in shown)
    again = await answer(streamrl("inspect", "digits", "3", "--reward", "--json"))
    assert again["note"] == "" and all(one["now"] == one["stored"] for one in again["samples"])
    found = await answer(streamrl("inspect", "digits", "--prompt", "7", "--json"))
    assert found["engine"].startswith("engine-0") and found["logprob_sum"] <= 0 and sum(found["versions"].values()) == len(found["tokens"])
    row = await answer(streamrl("inspect", "digits", "--row", "0", "--seed", "5", "--json"))
    assert row["prompt_tokens"] >= 1
    assert "--row from 0 to" in (await streamrl("inspect", "digits", "--row", "99999", code=1)).err

    # A window of what is trained now: engines, publications and arrows are in it.
    assert (await streamrl("trace", "digits", "--window", "1..3", "--out", "w.json")).err == ""
    lanes = check_format(written(place / "w.json"))
    assert len(named(lanes, "batch")) == 3 and named(lanes, "publish") and named(lanes, "stage 0.") and named(lanes, "tools")
    assert json.loads((place / "w.json").read_text())["otherData"]["batches"] == 3
    return life
