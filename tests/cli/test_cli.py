import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl import __version__
from streamrl.cli import main, parser
from streamrl.config.tree import Config, RunConfig
from streamrl.monitor.summary import Summary, write_summary
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir

ROOT = Path(__file__).parents[2]
VERBS = {
    *("init", "check-hook", "config", "completion", "up", "down", "status", "logs", "metrics", "page", "top", "worker", "attach", "eval"),
    *("credentials", "doctor", "gateway", "rewarder", "replay", "dead", "reward", "record", "export", "compare", "convert", "import-slime"),
    *("tap", "trace", "inspect", "page", "bench"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stopped_run(place: Path) -> RunDir:
    run = RunDir(place / "runs" / "demo")
    run.create()
    run.write_config(Config(run=RunConfig(name="demo")))
    summary = Summary(
        steps=7,
        reward_first=0.25,
        reward_last=0.75,
        heldout_first=None,
        heldout_last=None,
        tokens_made=1,
        tokens_trained=2,
        staleness_p50=0.0,
        staleness_max=1,
        dropped=0,
        swaps=3,
        wall_s=4.0,
    )
    write_summary(summary, run.summary_path)
    return run


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "\nhint: " in captured.err
    return captured.err


def test_the_verbs_are_known() -> None:
    actions = [action for action in parser()._actions if action.dest not in ("help", "version")]
    assert set(actions[0].choices or ()) == VERBS


@pytest.mark.process
def test_help_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "rich", "nats", "numpy", "pyarrow", "matplotlib"}
    code = f"import sys; from streamrl.cli import parser; parser(); print(sorted({heavy!r} & sys.modules.keys()))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert out.stdout == "[]\n"


@pytest.mark.parametrize(
    "arguments", [("status", "nobody"), ("down", "nobody"), ("worker", "engine", "--run", "nobody"), ("replay", "nobody", "--verify")]
)
def test_an_unknown_run_is_told_the_known_ones(stopped_run: RunDir, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    said = refused(capsys, *arguments)
    assert "got 'nobody'" in said and "runs: demo" in said


def test_up_refuses_what_it_cannot_start(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "TOML file" in refused(capsys, "up")
    assert "no such file: missing.toml" in refused(capsys, "up", "missing.toml")
    (place / "a.toml").write_text('[data]\ntrain = "a.jsonl"\n[tasks]\nmax_stalenes = 1\n')
    said = refused(capsys, "up", "a.toml")
    assert "tasks.max_stalenes" in said and "did you mean tasks.max_staleness?" in said
    (place / "a.toml").write_text('[data]\ntrain = "a.jsonl"\n')
    assert "--set section.key=value" in refused(capsys, "up", "a.toml", "--set", "steps")
    assert "a.jsonl" in refused(capsys, "up", "a.toml")
    (place / "a.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (place / "a.toml").write_text('[data]\ntrain = "a.jsonl"\n')
    run = RunDir(place / "runs" / "demo")
    run.create()
    with lock_run(run):
        said = refused(capsys, "up", "a.toml", "--name", "demo")
    assert f"process {os.getpid()}" in said and "streamrl down demo" in said
    (place / "a.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (place / "a.toml").write_text('[data]\ntrain = "a.jsonl"\n')
    assert "my run" in refused(capsys, "up", "a.toml", "--name", "my run")
    (place / "a.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (place / "a.toml").write_text('[data]\ntrain = "a.jsonl"\n')
    assert "got ''" in refused(capsys, "up", "a.toml", "--name", "")


def test_kinds_and_overrides_are_looked_at(stopped_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "worker", "traner", "--run", "demo")
    assert "did you mean 'trainer'?" in said and "rewarder, evaluator, engine, trainer" in said
    assert "takes no --verify" in refused(capsys, "replay", "demo", "--verify", "--set", "loss.clip_low=0.1")
    assert "has no part in" in refused(capsys, "tap", "demo", "--name", "shadow", "--set", "engine.slots=1")


def test_status_says_what_there_is(stopped_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["run"], line["state"], line["supervisor"], line["summary"]["steps"]) == ("demo", "stopped", None, 7)
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "demo" in out and "0.750" in out
    assert main(["status", "demo"]) == 0
    out = capsys.readouterr().out
    assert "run demo is stopped" in out and '"reward_last": 0.75' in out
    assert main(["status", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["numbers"] is None
    assert main(["down", "demo"]) == 0
    assert capsys.readouterr().out == "run demo was not running\n"


def test_the_version_and_how_to_start_a_run_are_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert "streamrl up" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"streamrl {__version__}\n")
    assert main(["up", "a\x1b[2Jb.toml"]) == 1
    err = capsys.readouterr().err
    assert "a\N{MIDDLE DOT}[2Jb.toml\nhint: " in err and "\x1b" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "demo", "--verify", "--tolerance", "-1"),
        ("replay", "demo", "--verify", "--tolerance", "nan"),
        ("replay", "demo", "--verify", "--tolerance", "inf"),
        ("down", "demo", "--timeout", "-1"),
        ("down", "demo", "--timeout", "inf"),
        ("dead", "replay", "demo", "1", "--wait", "nan"),
        ("dead", "replay", "demo", "1", "--wait", "-1"),
        ("reward", "demo", "--task", "0", "--rollout", "0", "--reward", "1", "--wait", "nan"),
        ("reward", "demo", "--task", "0", "--rollout", "0", "--reward", "1", "--wait", "inf"),
        ("reward", "demo", "--task", "0", "--rollout", "0", "--reward=-inf"),
    ],
)
def test_numbers_out_of_range_are_refused(stopped_run: RunDir, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "expected a finite number" in capsys.readouterr().err


def test_every_number_of_the_command_line_has_bounds() -> None:
    """`float` alone takes nan and inf; the types of `streamrl.cli.numbers` do not."""
    parsers, loose = [parser()], list[str]()
    while parsers:
        one = parsers.pop()
        for action in one._actions:
            if isinstance(action.choices, dict):
                parsers += [choice for choice in action.choices.values() if isinstance(choice, argparse.ArgumentParser)]
            elif action.type is float:
                loose.append(f"{one.prog} {action.dest}")
    assert loose == []


@pytest.mark.parametrize("arguments", [("worker", "producer"), ("attach", "single_turn")])
def test_who_joins_a_stopped_run_is_told_so(stopped_run: RunDir, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert "nobody supervises run 'demo'" in refused(capsys, *arguments, "--run", "demo")


def test_a_run_whose_start_was_killed_is_no_run_and_can_be_stopped(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(place / "runs" / "half")
    run.create()
    run.lock_path.touch()
    said = refused(capsys, "status", "half")
    assert "`streamrl up` begins it again" in said
    with lock_run(run):
        said = refused(capsys, "status", "half")
    assert "`streamrl down half`" in said
    assert main(["down", "half"]) == 0
    assert capsys.readouterr().out == "run half was not running\n"
