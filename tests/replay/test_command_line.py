"""The verbs on a finished run with a nats-server's store, and on a recording of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from streamrl.bus import connect
from streamrl.bus.server import NatsServer
from streamrl.cli import main
from streamrl.config.tree import Config
from streamrl.launch.prepare import prepare
from streamrl.launch.record import write_or_check
from streamrl.runtime.rundir import RunDir
from tests.kill.world import table_config
from tests.loop.harness import run_to_end
from tests.replay.conftest import FIXED

pytestmark = pytest.mark.nats


async def train(config: Config, run: RunDir) -> None:
    """Train on a server whose store lies where `streamrl up` has it; the server is stopped then."""
    server = NatsServer(run.bus_store)
    address = server.start()
    try:
        bus = await connect(address, config.run.name, config.bus)
        await write_or_check(bus, await prepare(config, run))
        await run_to_end(config, run, bus)
        await bus.close()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of runs with the finished run `demo` in it."""
    base = tmp_path_factory.mktemp("runs")
    config = table_config(base, run={"name": "demo", "steps": 12}, **FIXED)
    run = RunDir(base / "demo")
    run.create()
    run.write_config(config)
    asyncio.run(train(config, run))
    return base


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """Run a command that must succeed and prints JSON."""
    assert main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_record_replay_branch_and_compare(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, out = ("--dir", str(runs), "--json"), str(runs / "recording")
    recorded = answer(capsys, "record", "demo", "--out", out, "--checkpoints", *here)
    assert recorded["run"] == "demo" and recorded["entries"] == 12
    for source in ("demo", out):
        report = answer(capsys, "replay", source, "--verify", *here)
        assert report["ok"] and report["versions"] == report["equal"] == 12
        stretch = answer(capsys, "replay", source, "--verify", "--from", "0.7", "--to", "9", *here)
        assert (stretch["ok"], stretch["began"], stretch["ended"]) == (True, "0.6", "0.9")
    branch = answer(capsys, "replay", "demo", "--set", "trainer.optimizer.learning_rate=0.01", "--name", "fast", *here)
    assert branch["run"] == "fast" and branch["steps"] == 12
    compared = answer(capsys, "compare", out, "fast", "--out", str(runs / "both.png"), *here)
    assert (compared["same_batches_to"], compared["same_digests_to"]) == (12, 0)
    assert (runs / "both.png").stat().st_size > 10_000
    backtest = answer(capsys, "replay", out, "--policy-only", "--set", "tasks.max_staleness=1,4", "--set", "tasks.stale=drop", *here)
    assert [one["max_staleness"] for one in backtest["outcomes"]] == [1, 4]  # type: ignore[attr-defined]
    assert main(["status", "--dir", str(runs)]) == 0
    assert "fast" in capsys.readouterr().out


def test_what_a_user_gets_wrong(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (("replay", "nobody"), "expected the name or directory of a run"),
        (("replay", "demo", "--from", "x"), "expected a version such as"),
        (("replay", "demo", "--set", "model.hidden=3"), "has no part in training recorded samples"),
        (("record", "demo", "--out", str(runs)), "does not exist yet"),
        (("compare", "demo", "demo:nobody"), "expected a ledger with entries"),
    ):
        assert main([*arguments, "--dir", str(runs)]) == 1
        captured = capsys.readouterr()
        assert said in captured.err and "\nhint: " in captured.err, captured.err
