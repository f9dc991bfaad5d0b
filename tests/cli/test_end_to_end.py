"""The command line from start to end: a tabular policy learns, the run is looked at, joined, stopped, resumed and replayed."""

from __future__ import annotations

import asyncio
import json
import signal
from functools import partial
from pathlib import Path

import pytest

from streamrl.runtime.lock import holder
from streamrl.runtime.rundir import RunDir
from streamrl.weights.factory import weights_directory
from tests.support.digits import TABLE, write_digits
from tests.support.processes import until
from tests.support.programs import PIPE, STREAMRL, Start, answer, said

pytestmark = pytest.mark.nats

PRODUCER = """
async def mine(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    return chat.episode()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_digits(tmp_path, TABLE)
    return tmp_path


@pytest.fixture
def streamrl(start: Start) -> Start:
    """Starts one command."""
    return partial(start, *STREAMRL)


async def test_a_run_learns_and_its_log_gives_its_ledger_again(streamrl: Start, place: Path) -> None:
    summary = await answer(await streamrl("up", "run.toml", "--json"))
    assert summary["steps"] == 15
    assert summary["heldout_last"] == 1.0
    assert summary["staleness_max"] <= 1
    assert summary["swaps"] > 0
    run = RunDir(place / "runs" / "digits")
    assert not weights_directory(run.load_config().weights, run.name, run.path).exists()
    report = await answer(await streamrl("replay", "digits", "--verify", "--json"))
    assert report["ok"] is True
    assert report["equal"] == report["versions"] >= 15
    exported = await answer(await streamrl("export", "digits", "--out", "mine", "--json"))
    assert exported["version"].endswith(f".{report['versions']}")
    (own,) = run.hf.glob(f"v{report['versions']:08d}")
    assert (place / "mine" / "logits.npy").read_bytes() == (own / "logits.npy").read_bytes()
    again = await answer(await streamrl("export", "digits", "--json"))
    assert (Path(again["path"]), again["from"]) == (own, "there already")
    code, _, err = await said(await streamrl("export", "digits", "--version", "0.1", "--out", "other"))
    assert code == 1 and "expected a version that has a checkpoint or its bytes on the bus, got 0.1: there are" in err
    (listed,) = await answer(await streamrl("status", "--json"))
    assert (listed["state"], listed["summary"]) == ("finished", summary)


async def test_a_run_is_joined_looked_at_stopped_and_resumed(streamrl: Start, place: Path) -> None:
    run = RunDir(place / "runs" / "digits")
    endless = (
        "run.toml",
        "--plain",
        "--set",
        "run.max_seconds=600",
        "--set",
        "tasks.drop_zero_variance=false",
        "--set",
        "run.steps=100000",
    )
    first = await streamrl("up", *endless)
    log = run.log_path("trainer-0")
    await until(lambda: log.exists() and "event=training version" in log.read_text(), within_s=60)

    (place / "mine.py").write_text(PRODUCER)
    producer = await streamrl("attach", "mine.py:mine", "--run", "digits", "--concurrency", "4")
    await until(lambda: run.log_path("producer-1").exists() and "event=started" in run.log_path("producer-1").read_text(), within_s=60)
    status = await answer(await streamrl("status", "digits", "--json"))
    assert status["line"]["supervisor"] == first.pid
    workers = {worker["worker"] for worker in status["numbers"]["workers"]}
    assert workers == {"trainer-0", "engine-0", "feeder-0", "producer-0", "producer-1", "evaluator-0"}
    producer.send_signal(signal.SIGINT)
    code, out, _ = await said(producer)
    assert code == 0
    assert "producer-1 has left run digits after" in out

    code, out, _ = await said(await streamrl("down", "digits"))
    assert (code, out) == (0, "run digits has stopped\n")
    code, out, err = await said(first)
    assert (code, err) == (0, "")
    assert "digits stopped: " in out
    assert holder(run) is None
    stopped_at = json.loads(run.summary_path.read_text())["steps"]

    second = await streamrl("up", *endless)
    await until(lambda: "checkpoint" in run.log_path("trainer-0").read_text().partition("event=ended")[2], within_s=60)
    assert (await said(await streamrl("down", "digits")))[0] == 0
    code, out, _ = await said(second)
    assert code == 0
    assert "] resuming" in out
    assert json.loads(run.summary_path.read_text())["steps"] >= stopped_at


async def test_a_run_that_has_finished_is_left_alone(streamrl: Start, place: Path) -> None:
    summary = await answer(await streamrl("up", "run.toml", "--json"))
    run = RunDir(place / "runs" / "digits")
    log = run.log_path("trainer-0").read_bytes()
    code, out, err = await said(await streamrl("up", "run.toml", "--plain"))
    assert (code, err) == (0, "")
    assert f"nothing is left to do: the run has reached run.steps = {summary['steps']} with version" in out
    assert f"digits finished: {summary['steps']} steps" in out
    assert run.log_path("trainer-0").read_bytes() == log, "no worker was started"
    for task, rollout in ((10**6, 0), (0, 4)):
        words = ("reward", "digits", "--task", str(task), "--rollout", str(rollout), "--reward", "1")
        code, _, err = await said(await streamrl(*words))
        assert (code, f"got {task or rollout}" in err) == (1, True)


async def test_a_terminal_that_lacks_letters_gets_a_sign_for_each(streamrl: Start, tmp_path: Path) -> None:
    folder = tmp_path / "\N{HIRAGANA LETTER A}\N{LATIN SMALL LETTER E WITH ACUTE}"
    folder.mkdir()
    write_digits(folder, TABLE)
    in_latin = partial(streamrl, cwd=folder, env={"PYTHONIOENCODING": "latin-1"}, stdout=PIPE)
    process = await in_latin("up", "run.toml", "--plain", "--set", "run.steps=2")
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, err) == (0, b"")
    assert "/?\N{LATIN SMALL LETTER E WITH ACUTE}/runs/digits/summary.json" in out.decode("latin-1").replace("\n", "")
    process = await in_latin("status")
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, err) == (0, b"")


async def test_a_run_whose_weights_diverge_ends_with_that_word(streamrl: Start, place: Path) -> None:
    code, out, err = await said(await streamrl("up", "run.toml", "--plain", "--set", "warmup.learning_rate=1e60"))
    assert code == 1
    assert "trainer-0 stopped: the weights diverged" in err
    assert "hint: lower trainer.optimizer.learning_rate" in err
    assert "restart" not in out


async def test_a_run_that_is_stopped_says_how_to_go_on(streamrl: Start, place: Path) -> None:
    words = ("run.toml", "--plain", "--name", "other", "--set", "run.steps=100000", "--set", "tasks.drop_zero_variance=false")
    process = await streamrl("up", *words)
    log = RunDir(place / "runs" / "other").log_path("trainer-0")
    await until(lambda: log.exists() and "event=training version" in log.read_text(), within_s=60)
    process.send_signal(signal.SIGINT)
    code, out, _ = await said(process)
    assert code == 0
    assert "  go on with: streamrl up run.toml --name other --set run.steps=100000 --set tasks.drop_zero_variance=false\n" in out
