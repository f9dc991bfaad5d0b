"""The verbs on a finished run with a nats-server's store, and on a recording of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.bus import Bus, connect
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.server import NatsServer
from streamrl.cli import main
from streamrl.config.tree import Config
from streamrl.data.model import ensure_model
from streamrl.history.record import record_run
from streamrl.history.replay import verify
from streamrl.history.tap import TapSettings, tap
from streamrl.launch.prepare import prepare
from streamrl.runtime.lock import lock_run
from streamrl.runtime.run_record import write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.subjects import SAMPLES
from tests.support.compilers import without_compiler
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.printed import printed
from tests.support.recorded_run import FIXED
from tests.support.torch_runs import limited
from tests.support.world.world import table_config

pytestmark = pytest.mark.nats


@asynccontextmanager
async def served(config: Config, run: RunDir) -> AsyncIterator[Bus]:
    """A server whose store lies where `streamrl up` has it; it is stopped then."""
    server = NatsServer(run.bus_store)
    address = server.start()
    address.save(run.bus_path)
    try:
        bus = await connect(address, config.run.name, config.bus)
        yield bus
        await bus.close()
    finally:
        server.stop()


async def train(config: Config, run: RunDir) -> None:
    async with served(config, run) as bus:
        await write_or_check(bus, await prepare(config, run))
        await run_to_end(config, run, bus)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of runs with the finished run `demo` in it."""
    base = tmp_path_factory.mktemp("runs")
    config = table_config(base, run={"name": "demo", "steps": 9}, **FIXED)
    run = RunDir(base / "demo")
    run.create()
    run.write_config(config)
    asyncio.run(train(config, run))
    return base


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """Run a command that must succeed and prints JSON."""
    return json.loads(printed(capsys, *arguments).out)


def test_record_replay_branch_and_compare(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, out = ("--dir", str(runs), "--json"), str(runs / "recording")
    recorded = answer(capsys, "record", "demo", "--out", out, "--checkpoints", *here)
    assert recorded["run"] == "demo" and recorded["entries"] == 9
    for source in ("demo", out):
        report = answer(capsys, "replay", source, "--verify", *here)
        assert report["ok"] and report["versions"] == report["equal"] == 9
        stretch = answer(capsys, "replay", source, "--verify", "--from", "0.5", "--to", "7", *here)
        assert (stretch["ok"], stretch["began"], stretch["ended"]) == (True, "0.4", "0.7")
    branch = answer(capsys, "replay", "demo", "--set", "trainer.optimizer.learning_rate=0.01", "--name", "fast", *here)
    assert branch["run"] == "fast" and branch["steps"] == 9 and (runs / "fast" / "plot.png").stat().st_size > 10_000
    compared = answer(capsys, "compare", out, "fast", "--out", str(runs / "both.png"), *here)
    assert (compared["same_batches_to"], compared["same_digests_to"]) == (9, 0)
    assert (runs / "both.png").stat().st_size > 10_000
    backtest = answer(capsys, "replay", out, "--policy-only", "--set", "tasks.max_staleness=1,4", "--set", "tasks.stale=drop", *here)
    assert [one["max_staleness"] for one in backtest["outcomes"]] == [1, 4]  # type: ignore[attr-defined]
    assert "fast" in printed(capsys, "status", "--dir", str(runs)).out


LOSS = "loss.clip_low=0.1"
WRONG = (
    (("replay", "nobody"), "expected the name or directory of a run"),
    (("replay", "demo", "--from", "x"), "expected a version such as"),
    (("replay", "demo", "--from", "9"), "--from below 9"),
    (("replay", "demo", "--set", LOSS, "--name", "tried", "--from", "99"), "--from below 9"),
    (("replay", "demo", "--to", "13"), "at most 9"),
    (("replay", "demo", "--from", "7", "--to", "5"), "expected --to above --from, 7"),
    (("replay", "demo", "--verify", "--set", LOSS), "takes no --verify"),
    (("replay", "demo", "--name", "x"), "takes no --name"),
    (("replay", "demo", "--set", LOSS, "--name", "x" * 129), "at most 128 of them"),
    (("replay", "demo", "--policy-only", "--to", "5", "--verify"), "takes no --verify or --to"),
    (("replay", "demo", "--set", "engine.slots=1"), "engine.slots"),
    (("replay", "demo", "--set", "tasks.max_stalenes=1"), "did you mean tasks.max_staleness?"),
    (("replay", "demo", "--policy-only", "--set", "tasks.max_stalenes=1"), "did you mean tasks.max_staleness?"),
    (("record", "demo", "--out", "."), "does not exist yet"),
    (("record", "demo", "--out", "/dev/null/recording"), "cannot be made"),
    (("compare", "demo", "demo:nobody"), "expected a ledger with entries"),
    (("compare", "demo", "demo", "--out", "/dev/null/both.png"), "cannot be written"),
    (("tap", "demo", "--name", "shadow"), "nobody supervises run 'demo'"),
    (("attach", "single_turn", "--run", "demo"), "nobody supervises run 'demo'"),
    (("attach", "single_turn", "--run", "demo", "--source", "mian"), "expected --source main or warmup"),
    (("worker", "engine", "--run", "demo", "--index", "-3"), "expected --index of at least 0"),
    (("reward", "demo", "--task", "0", "--rollout", "0", "--reward", "1", "--part", "=1"), "--part NAME=VALUE"),
)


def test_what_a_user_gets_wrong(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(runs.iterdir())
    for arguments, said in WRONG:
        assert main([*arguments, "--dir", str(runs)]) == 1, arguments
        err = capsys.readouterr().err
        assert said in err and "\nhint: " in err, (arguments, err)
    assert sorted(runs.iterdir()) == before


def test_a_branch_has_no_log(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("--dir", str(runs))
    arguments = ("replay", "demo", "--set", LOSS, "--name", "tried", *here)
    assert main([*arguments, "--from", "7"]) == 0
    assert "no run has" in printed(capsys, *arguments, code=1).err
    for wrong in (("record", "tried", "--out", str(runs / "never")), ("dead", "list", "tried"), ("dead", "show", "tried", "3")):
        assert "got 'tried'" in printed(capsys, *wrong, *here, code=1).err
    assert "got the branch 'tried'" in printed(capsys, "replay", "tried", *here, code=1).err


def test_a_reward_hours_later_is_no_arrival_of_a_back_test(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("--dir", str(runs), "--json")
    tested = ("replay", "demo", "--policy-only", "--set", "tasks.max_staleness=1", "--set", "tasks.stale=drop")
    before = answer(capsys, *tested, *here)
    assert answer(capsys, "reward", "demo", "--task", "0", "--rollout", "0", "--reward", "0.5", *here)["state"] == "dropped"
    assert answer(capsys, *tested, *here) == before


async def test_a_run_that_ends_while_it_is_recorded_is_recorded_from_its_store(runs: Path, tmp_path: Path) -> None:
    run = RunDir(runs / "demo")
    config = run.load_config()
    hasty = replace(config, bus=replace(config.bus, patience_s=1.5))
    run.write_config(hasty)
    try:
        with lock_run(run):  # it looks as if it were up, but its server is gone
            recording = asyncio.create_task(record_run(run, tmp_path / "out"))
            await asyncio.sleep(0.5)
        assert (await recording).entries == 9
    finally:
        run.write_config(config)


async def test_the_last_message_that_a_version_needs_is_gone(tmp_path: Path, nats_bus: JetStreamBus, run_id: str) -> None:
    run, config = make_run(tmp_path, table_config(tmp_path, run={"name": run_id, "steps": 4}))
    ensure_model(config, run.model_dir)
    await run_to_end(config, run, nats_bus)
    cursor = (await read_ledger(nats_bus, run_id))[-1].cursor
    for sequence in range(cursor, (await nats_bus.state(SAMPLES)).last + 1):
        await nats_bus.connection.request(f"$JS.API.STREAM.MSG.DELETE.{run_id}-samples", {"seq": sequence})
    assert (await nats_bus.state(SAMPLES)).last >= cursor, "the server keeps the numbers of messages that it lost"
    async with asyncio.timeout(60):
        report = await verify(config, nats_bus, run.model_dir)
    assert not report.ok and report.versions < 4 and f"message {cursor}," in report.problem


UNCOMPILED = "the layers are not compiled, so that training is slower: "


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
def test_replay_branch_and_tap_say_what_a_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that replay, branch and tap say what a run would of how its trainer computes: here, that the compiler is missing."""
    config = limited(tmp_path, 0)
    run, config = make_run(tmp_path, replace(config, run=replace(config.run, steps=2)))
    ensure_model(config, run.model_dir)
    asyncio.run(train(config, run))
    compiled = replace(config, trainer=replace(config.trainer, compile="on", attention="packed"))
    run.write_config(compiled)
    with without_compiler():
        capsys.readouterr()
        here = (run.name, "--dir", str(tmp_path), "--json")
        for words in (("replay", *here), ("replay", *here, "--set", "loss.clip_low=0.1")):
            assert printed(capsys, *words).err.count(f"notice: {UNCOMPILED}") == 1, words

        async def tapped() -> list[str]:
            said: list[str] = []
            async with served(compiled, run) as bus:
                await tap(Worker(config=compiled, run_dir=run, bus=bus, kind="trainer", index=1), TapSettings(name="late"), say=said.append)
            return said

        assert [text.startswith(UNCOMPILED) for text in asyncio.run(tapped())] == [True]
