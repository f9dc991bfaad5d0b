"""The command line from start to end: a tabular policy learns, the run is looked at and replayed, its metrics have the declared names."""

import json
import math
from pathlib import Path

import pytest

from streamrl.bus import connect
from streamrl.bus.server import NatsServer
from streamrl.monitor.metrics_file import decoded, files
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.events import MetricReport
from streamrl.schemas.subjects import METRICS as REPORTS
from streamrl.telemetry.names import LENGTHS, METRICS, declared
from streamrl.weights.factory import weights_directory
from tests.support.digits import TABLE, write_digits
from tests.support.harness import read_ledger
from tests.support.looked_at import STRICT, LookedAt, sets, that_has_finished
from tests.support.programs import STREAMRL, Start, said
from tests.support.shared import shared

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> LookedAt:
    with shared():
        return that_has_finished(tmp_path_factory.mktemp("finished"))


def test_a_run_learns_and_its_log_gives_its_ledger_again(finished: LookedAt) -> None:
    run, summary = finished.run, json.loads(finished.run.summary_path.read_bytes())
    assert (summary["steps"], summary["heldout_last"]) == (15, 1.0)
    assert summary["staleness_max"] <= 1
    assert summary["swaps"] > 0
    assert summary["slo"] == {} and "slo" not in finished.said_by_up, "a healthy run meets its objectives at the defaults"
    assert not weights_directory(run.load_config().weights, run.name, run.path).exists()
    report = finished.answer("replay", "digits", "--verify")
    assert report["ok"] is True
    assert report["equal"] == report["versions"] >= 15
    exported = finished.answer("export", "digits", "--out", "mine")
    assert exported["version"].endswith(f".{report['versions']}")
    (own,) = run.hf.glob(f"v{report['versions']:08d}")
    assert (finished.place / "mine" / "logits.npy").read_bytes() == (own / "logits.npy").read_bytes()
    again = finished.answer("export", "digits")
    assert (Path(again["path"]), again["from"]) == (own, "there already")
    code, _, err = finished.said("export", "digits", "--version", "0.1", "--out", "other")
    assert code == 1 and "got 0.1: there are" in err


def test_a_run_that_has_finished_is_left_alone(finished: LookedAt) -> None:
    log, summary = finished.log("trainer-0"), json.loads(finished.run.summary_path.read_bytes())
    code, out, err = finished.said("up", "run.toml", "--plain", *sets(*STRICT))
    assert (code, err) == (0, "")
    assert f"run.steps = {summary['steps']} with version" in out and f"digits finished: {summary['steps']} steps" in out
    assert finished.log("trainer-0") == log, "no worker was started"
    for task, rollout in ((10**6, 0), (0, 4)):
        code, _, err = finished.said("reward", "digits", "--task", str(task), "--rollout", str(rollout), "--reward", "1")
        assert (code, f"got {task or rollout}" in err) == (1, True)


def test_status_and_top_of_a_run_that_has_finished(finished: LookedAt) -> None:
    (listed,) = finished.answer("status")
    assert (listed["state"], listed["summary"]) == ("finished", json.loads(finished.run.summary_path.read_bytes()))
    code, out, err = finished.said("top", "digits", "--once")
    assert (code, err) == (0, "")
    assert out.startswith("streamrl digits  finished\n") and " steps in " in out
    code, out, _ = finished.said("top", "digits")
    assert code == 0 and "run digits is finished" in out
    assert finished.answer("top", "digits")["summary"]["tokens_trained"] > 0


async def test_a_terminal_that_lacks_letters_gets_a_sign_for_each(start: Start) -> None:
    name = "\N{HIRAGANA LETTER A}\N{LATIN SMALL LETTER E WITH ACUTE}"
    process = await start(*STREAMRL, "init", name, "--example", "calculator_tool", env={"PYTHONIOENCODING": "latin-1"})
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert "streamrl up '?\N{LATIN SMALL LETTER E WITH ACUTE}/calculator.toml'" in out.decode("latin-1")


async def test_a_run_whose_weights_diverge_ends_with_that_word(start: Start, tmp_path: Path) -> None:
    write_digits(tmp_path, TABLE)
    code, out, err = await said(await start(*STREAMRL, "up", "run.toml", "--plain", *sets("warmup.learning_rate=1e60", "data.heldout=")))
    assert code == 1
    assert "the weights diverged" in err and "trainer.optimizer.learning_rate" in err
    assert "restart" not in out


async def reported(run: RunDir) -> tuple[set[str], set[str]]:
    """Names of all values, and of all histograms, in the ledger and in the workers' reports."""
    server = NatsServer(run.bus_store)
    server.start()
    try:
        bus = await connect(server.address, "digits", run.load_config().bus)
        entries = await read_ledger(bus, "digits")
        state = await bus.state(REPORTS)
        reports = [
            decode((await bus.fetch(REPORTS, number)).body, MetricReport, where="reports") for number in range(state.first, state.last + 1)
        ]
        await bus.close()
    finally:
        server.stop()
    assert reports and entries
    values = {name for entry in entries for name in entry.metrics}
    values |= {name for one in reports for group in (one.mean, one.sum, one.max, one.last) for name in group}
    return values, {name for one in (*entries, *reports) if isinstance(one.histograms, dict) for name in one.histograms}


async def test_every_name_without_a_condition_is_seen_and_every_name_that_is_seen_is_declared(finished: LookedAt) -> None:
    run = finished.run
    rows = [decoded(line) for path in files(run.metrics) for line in path.read_bytes().splitlines()]
    seen = {name for row in rows if row is not None for name, value in row.values.items() if math.isfinite(value)}
    assert [name for name, one in METRICS.items() if not one.when and name not in seen] == []
    assert {"eval/heldout", "train/answer_probability", "tokens/evaluated_total", "lengths/dropped_p50"} <= seen
    values, histograms = await reported(run)
    assert [name for name in values if declared(name) is None] == [] and histograms <= LENGTHS.keys() and "lengths/trained" in histograms
