"""`trace` and `inspect` on a real run, while it is up, with a reader's rights, and when it is over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from streamrl.bus.permissions import READER
from streamrl.bus.reading import read_key
from streamrl.runtime.lock import holder
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.control import WorkerPresence
from streamrl.schemas.events import MetricReport
from streamrl.schemas.subjects import METRICS
from tests.history.test_trace_window import check_format, named, written
from tests.support.digits import TABLE, write_digits
from tests.support.processes import until
from tests.support.programs import STREAMRL, Start, answer, said

pytestmark = [pytest.mark.nats, pytest.mark.process]

PRODUCER = """
async def mine(task, engine):
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


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_digits(tmp_path, TABLE)
    (tmp_path / "mine.py").write_text(PRODUCER)
    (tmp_path / "judge.py").write_text(REWARD)
    return tmp_path


@pytest.fixture
def streamrl(start: Start) -> Start:
    return partial(start, *STREAMRL)


HANGING = """
import asyncio
from pathlib import Path

async def mine(task, engine):
    seen = Path("seen")
    if (task.source, task.index) == ("main", 3) and not seen.exists():
        seen.touch()
        await asyncio.sleep(600)
    chat = engine.chat(task)
    await chat.generate()
    return chat.episode()
"""


def without_operator(run: RunDir) -> None:
    """Take the operator's login away from who reads: what is left is the reader's."""
    run.bus_path.rename(run.bus_path.with_suffix(".hidden"))


async def test_a_run_of_two_turns_up_and_over(streamrl: Start, place: Path) -> None:
    run = RunDir(place / "runs" / "digits")
    options = ("run.max_seconds=600", "run.steps=100000", "tasks.drop_zero_variance=false", "reward.kind=judge.py:mine")
    options += ("producer.function=mine.py:mine", "tasks.num_rollouts=4", "warmup.max_steps=0")
    up = await streamrl("up", "run.toml", "--plain", *(word for option in options for word in ("--set", option)))
    log = run.log_path("trainer-0")
    await until(lambda: log.exists() and "event=training version" in log.read_text(), within_s=90)
    without_operator(run)
    async with asyncio.timeout(90):
        while (await said(await streamrl("trace", "digits", "--window", "5..5", "--out", "w.json")))[0]:
            await asyncio.sleep(0.5)

    # A trained task: two turns with a message between them, each with its own times.
    life = await answer(await streamrl("trace", "digits", "3/1", "--json"))
    assert life["state"] == "trained" and life["claim"]["producer"].startswith("producer-")
    [sample] = life["rollouts"][0]["samples"]
    first, second = sample["turns"]
    times = [life["claim"]["issued_s"], life["claim"]["claimed_s"], first["asked_s"], first["began_s"], first["finished_s"]]
    times += [second["asked_s"], second["began_s"], second["finished_s"], sample["scored_s"]]
    assert None not in times and times == sorted(times)
    assert second["before"] >= 1 and first["engine"].startswith("engine-0")
    text = (await said(await streamrl("trace", "digits", "3/1")))[1]
    assert "turn 2" in text and "tools" in text and "not recorded" not in text

    # The newest tasks: wherever they are, that is said.
    code, _, err = await said(await streamrl("trace", "digits", "999999"))
    newest = int(err.partition("0 to ")[2].partition(" have been issued")[0])
    assert code == 1 and newest > 3
    open_now = await answer(await streamrl("trace", "digits", str(newest), "--json"))
    assert open_now["detail"] and open_now["credit"].startswith("granted after version")

    # Stored and live: the reward gives what is stored; an engine answers as it does to producers.
    shown = await answer(await streamrl("inspect", "digits", "3", "--json"))
    assert [one["rollout"] for one in shown] == [0, 1, 2, 3] and all(one["reward"] >= 2 for one in shown)
    again = await answer(await streamrl("inspect", "digits", "3", "--reward", "--json"))
    assert again["note"] == "" and all(one["now"] == one["stored"] for one in again["samples"])
    found = await answer(await streamrl("inspect", "digits", "--prompt", "7", "--json"))
    assert found["engine"].startswith("engine-0") and found["logprob_sum"] <= 0 and sum(found["versions"].values()) == len(found["tokens"])
    row = await answer(await streamrl("inspect", "digits", "--row", "0", "--seed", "5", "--json"))
    assert row["prompt_tokens"] >= 1
    assert "expected --row from 0 to" in (await said(await streamrl("inspect", "digits", "--row", "99999")))[2]

    # A window of what is trained now: engines, publications and arrows are in it.
    code, out, err = await said(await streamrl("trace", "digits", "--window", "1..3", "--out", "w.json"))
    assert (code, err) == (0, ""), out
    lanes = check_format(written(place / "w.json"))
    assert len(named(lanes, "batch")) == 3 and named(lanes, "publish") and named(lanes, "stage 0.") and named(lanes, "tools")

    run.bus_path.with_suffix(".hidden").rename(run.bus_path)
    up.send_signal(signal.SIGINT)
    assert (await said(up))[0] == 0
    assert holder(run) is None

    # It is over: the same from its store, and no engine answers.
    after = await answer(await streamrl("trace", "digits", "3/1", "--json"))
    assert after == life
    code, _, err = await said(await streamrl("inspect", "digits", "--prompt", "7"))
    assert code == 1 and "expected a run that is up" in err
    assert json.loads((place / "w.json").read_text())["otherData"]["batches"] == 3


async def test_a_task_whose_producer_was_killed_tells_who_had_it(streamrl: Start, place: Path) -> None:
    (place / "mine.py").write_text(HANGING)
    run = RunDir(place / "runs" / "digits")
    options = ("run.max_seconds=600", "run.steps=100000", "tasks.drop_zero_variance=false", "producer.function=mine.py:mine")
    options += ("tasks.num_rollouts=2", "tasks.batch_tasks=1", "warmup.max_steps=0", "producer.workers=2", "bus.ack_wait_s=2")
    up = await streamrl("up", "run.toml", "--plain", *(word for option in options for word in ("--set", option)))
    await until(lambda: (place / "seen").exists(), within_s=90)
    async with open_bus(run, role=READER) as bus, asyncio.timeout(120):
        reports = bus.read(METRICS, after=0)
        while 3 not in ((one := decode((await anext(reports)).body, MetricReport)).tasks or ()):
            pass
        presence = await read_key(bus.kv, f"presence/workers/{one.worker}", WorkerPresence)
    assert presence is not None
    os.kill(presence.pid, signal.SIGKILL)
    async with asyncio.timeout(120):
        while (life := await answer(await streamrl("trace", "digits", "3", "--json")))["state"] == "open":
            await asyncio.sleep(0.5)
    assert life["claim"]["deliveries"] == 2 and [had["producer"] for had in life["claim"]["earlier"]] == [one.worker]
    text = (await said(await streamrl("trace", "digits", "3")))[1]
    assert f"had by    {one.worker}, by its reports from +" in text and "left no record" not in text
    up.send_signal(signal.SIGINT)
    assert (await said(up))[0] == 0
