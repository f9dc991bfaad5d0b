"""The command line in this process: what it refuses, `metrics`, `init`, `config`, completion, and `eval` on model directories."""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pandas
import pyarrow.parquet as pq
import pytest

from scripts.docs.configuration import sections
from streamrl import __version__
from streamrl.cli import main, parser
from streamrl.cli.completion import completion_script
from streamrl.cli.examples import example_names
from streamrl.config.evaluation_sets import problem_sets
from streamrl.config.load import load
from streamrl.config.metrics import MetricsConfig
from streamrl.config.schema import config_schema
from streamrl.config.tree import Config, DataConfig, ModelConfig
from streamrl.data.model import write_qwen3, write_table
from streamrl.data.problems import load_set
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError, DataError
from streamrl.history.evaluate import config_of_directory, with_sets
from streamrl.monitor import metrics_export, metrics_read
from streamrl.monitor.metrics_file import MetricsFile, encoded
from streamrl.monitor.metrics_read import Metrics
from streamrl.monitor.series import Row
from streamrl.monitor.summary import Summary, write_summary
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir
from tests.support.rotation import EACH_LISTING, Rotation
from tests.support.runs import bare_run, named_run

ROOT = Path(__file__).parents[2]
VERBS = {
    *("init", "check-hook", "config", "completion", "up", "down", "status", "runs", "logs", "metrics", "top", "worker", "attach", "eval"),
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
    run = named_run(place / "runs" / "demo")
    ends = {"reward_first": 0.25, "reward_last": 0.75, "heldout_first": None, "heldout_last": None}
    counts = {"tokens_made": 1, "tokens_trained": 2, "staleness_p50": 0.0, "staleness_max": 1, "dropped": 0, "swaps": 3}
    write_summary(Summary(steps=7, **ends, **counts, wall_s=4.0), run.summary_path)
    return run


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


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
    with lock_run(bare_run(place / "runs" / "demo")):
        said = refused(capsys, "up", "a.toml", "--name", "demo")
    assert f"process {os.getpid()}" in said and "streamrl down demo" in said
    assert "my run" in refused(capsys, "up", "a.toml", "--name", "my run")
    assert "got ''" in refused(capsys, "up", "a.toml", "--name", "")


def test_kinds_and_overrides_are_looked_at(stopped_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "worker", "traner", "--run", "demo")
    assert "did you mean 'trainer'?" in said and "rewarder, evaluator, engine, trainer" in said
    assert "takes no --verify" in refused(capsys, "replay", "demo", "--verify", "--set", "loss.clip_low=0.1")
    assert "has no part in" in refused(capsys, "tap", "demo", "--name", "shadow", "--set", "engine.slots=1")


def test_status_says_what_there_is(stopped_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = json.loads(printed(capsys, "status", "--json"))
    assert (line["run"], line["state"], line["supervisor"], line["summary"]["steps"]) == ("demo", "stopped", None, 7)
    out = printed(capsys, "status")
    assert "demo" in out and "0.750" in out
    out = printed(capsys, "status", "demo")
    assert "run demo is stopped" in out and '"reward_last": 0.75' in out
    report = json.loads(printed(capsys, "status", "demo", "--json"))
    assert (report["state"], report["live"], report["reward"], report["tokens_trained"]) == ("stopped", False, 0.75, 2)
    assert printed(capsys, "down", "demo") == "run demo was not running\n"


def test_the_version_and_how_to_start_a_run_are_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "streamrl up" in printed(capsys, "status")
    assert json.loads(printed(capsys, "status", "--json")) == []
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


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("my.toml run.steps=3", "--set run.steps=3"),
        ("my.toml ++run.steps=3", "--set run.steps=3"),
        ("run.steps=3 my.toml", "--set run.steps=3"),
        ("run.steps=3 --set run.seed=1 my.toml run.name=a", "--set run.steps=3 --set run.name=a"),
        ("my.toml --set run.seed=1 --frob", ""),
        ("my.toml other.toml", ""),
    ],
)
def test_a_key_without_its_flag_gets_the_flag(capsys: pytest.CaptureFixture[str], words: str, hint: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["up", *words.split()])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.strip().endswith(hint)


def test_a_key_in_place_of_the_configuration_gets_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--set run.steps=3" in refused(capsys, "up", "run.steps=3")


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
    run = bare_run(place / "runs" / "half")
    run.lock_path.touch()
    assert "interrupted" in printed(capsys, "status", "half")
    assert "`streamrl up`" in refused(capsys, "metrics", "half")
    with lock_run(run):
        assert f"preparing (process {os.getpid()})" in printed(capsys, "status", "half")
        report = json.loads(printed(capsys, "status", "half", "--json"))
        assert (report["state"], report["live"], report["supervisor"], report["step"]) == ("preparing", False, os.getpid(), None)
        assert "`streamrl down half`" in refused(capsys, "metrics", "half")
    assert printed(capsys, "down", "half") == "run half was not running\n"


def batch(number: int, **values: float) -> Row:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return Row(time_s=1000.0 + number, kind="batch", version=f"0.{number}", step=number, values={"train/loss": number / 4} | named)


def window(of: str, number: int, behind: float) -> Row:
    return Row(time_s=2000.0 + number, kind="window", of=of, version="0.9", step=9, values={"lag/versions_behind": behind})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with nine batches and one window, in several files."""
    monkeypatch.chdir(tmp_path)
    run = named_run(tmp_path / "runs" / "demo")
    file = MetricsFile(run.metrics, MetricsConfig(file_bytes=300))
    for number in range(1, 10):
        file.write([batch(number, train__lr=0.5)] if number < 4 else [batch(number)])
    file.write([window("", 1, 3.0), window("engine-0", 1, 1.0), window("engine-1", 1, 3.0)])
    file.close()
    assert len(list(run.metrics.glob("metrics-*.jsonl"))) > 1
    return run


def test_newest_values_have_units_and_workers_and_a_run_that_is_down_is_not_followed(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, "metrics", "demo")
    assert re.search(r"train/loss\s+2\.25\s+nats", out)
    assert re.search(r"train/lr\s+0\.5\s+1", out), "its newest value is in an older file"
    assert re.search(r"lag/versions_behind\s+3\s+versions\s+engine-0 1, engine-1 3", out)
    assert out.splitlines()[-1].endswith("version 0.9")
    assert printed(capsys, "metrics", "demo", "--follow") == ""


def test_names_are_chosen_by_pattern_and_json_is_json(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    newest = {"value": 3.0, "unit": "versions", "time_s": 2001.0, "version": "0.9", "of": {"engine-0": 1.0, "engine-1": 3.0}}
    assert json.loads(printed(capsys, "metrics", "demo", "--name", "lag/*", "--json")) == {"lag/versions_behind": newest}
    assert "no values" in printed(capsys, "metrics", "demo", "--name", "bus/*")


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_all_rows_are_exported(run: RunDir, ending: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_export, "_CHUNK_ROWS", 5)
    out = run.path.parent / f"out.{ending}"
    assert "12 rows written" in printed(capsys, "metrics", "demo", "--export", str(out))
    if ending == "csv":
        frame: Any = pandas.read_csv(out, dtype={"version": str}, keep_default_na=True)
    elif ending == "parquet":
        frame = pq.read_table(out).to_pandas()
    else:
        frame = pandas.read_json(out, lines=True, dtype={"version": str})
    assert set(frame.columns) == {"time_s", "kind", "of", "version", "step", "train/loss", "train/lr", "lag/versions_behind"}
    assert list(frame[frame.kind == "batch"]["train/loss"]) == [number / 4 for number in range(1, 10)]
    assert frame["train/lr"].count() == 3
    assert "not there yet" in refused(capsys, "metrics", "demo", "--export", str(out))


def test_an_export_of_some_names_has_their_columns_only(run: RunDir) -> None:
    out = run.path.parent / "lr.parquet"
    assert main(["metrics", "demo", "--name", "train/lr", "--export", str(out)]) == 0
    table = pq.read_table(out)
    assert (table.num_rows, table.column_names[-1]) == (3, "train/lr")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["metrics", "nothing"], "expected the name or directory of a run"),
        (["metrics", "demo", "--name", "train/los"], "did you mean 'train/loss'?"),
        (["metrics", "demo", "--export", "x.xls"], "ends with .csv, .parquet, .jsonl"),
        (["metrics", "demo", "--export", "none/x.csv"], "cannot be written"),
        (["metrics", "demo", "--export", "x.csv", "--name", "bus/*"], "no values of these metrics yet"),
        (["metrics", "demo", "--export", "x.csv", "--json"], "got both"),
    ],
)
def test_what_cannot_be_is_said(run: RunDir, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert said in error and "hint:" in error
    assert list(run.path.parent.parent.glob("*x.*")) == []


def test_torn_lines_are_passed_over_and_counted(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with (run.metrics / "metrics.jsonl").open("ab") as file:
        file.write(b"no row\n" + encoded(batch(10)) + b'{"time_s":1')
    assert main(["metrics", "demo", "--name", "train/loss", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["train/loss"]["value"] == 2.5
    assert said.err.startswith("1 lines") and said.err.count("\n") == 1
    assert main(["metrics", "demo", "--export", "all.csv"]) == 0
    assert capsys.readouterr().err == said.err


def test_rows_that_come_are_followed_over_files_that_are_put_aside(run: RunDir) -> None:
    metrics, done = Metrics(run, "train/loss"), threading.Event()
    file = MetricsFile(run.metrics, MetricsConfig(file_bytes=300))

    def write() -> None:
        for number in range(10, 30):
            file.write([batch(number)])
        file.close()
        done.set()

    writer = threading.Thread(target=write)

    def over() -> bool:
        """Asked before each look; the first time nothing has been written yet."""
        if writer.ident is None:
            writer.start()
        return done.is_set()

    followed = list(metrics.follow(over))
    writer.join()
    assert [row.step for row in followed] == list(range(10, 30))


def test_files_that_are_put_aside_while_all_are_read_cost_no_row(run: RunDir) -> None:
    rows, file = Metrics(run).rows(), MetricsFile(run.metrics, MetricsConfig(file_bytes=300))
    found = [next(rows)]
    for number in range(10, 30):
        file.write([batch(number)])
    file.close()
    found += rows
    assert [row.step for row in found if row.kind == "batch"] == list(range(1, len(found) - 2)), "those of the windows stand among them"
    assert sum(row.kind == "window" for row in found) == 3 and len(found) >= 12


def test_newest_values_are_found_while_the_oldest_files_go(run: RunDir) -> None:
    file, done = MetricsFile(run.metrics, MetricsConfig(file_bytes=100, keep_bytes=1000)), threading.Event()

    def write() -> None:
        number = 10
        while not done.is_set():
            file.write([batch(number)])
            number += 1
        file.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        metrics = Metrics(run, "train/loss")
        for _ in range(200):
            assert metrics.newest().keys() <= {"train/loss"}
            steps = [row.step for row in metrics.rows()]
            assert steps == sorted(steps)
    finally:
        done.set()
        writer.join()


@EACH_LISTING
@pytest.mark.parametrize("keep_bytes", [0, 1000, 1 << 20])
def test_rows_are_in_order_in_any_listing(run: RunDir, monkeypatch: pytest.MonkeyPatch, rows: int, listing: str, keep_bytes: int) -> None:
    metrics = Metrics(run, "train/loss")
    files = Rotation(run.metrics, monkeypatch, batch, last=9, keep_bytes=keep_bytes, rows=rows, listing=listing)
    files.write(1)
    for _ in range(3):
        before = files.number
        steps = [row.step for row in metrics.rows()]
        assert steps == list(range(steps[0], steps[-1] + 1)) and steps[-1] >= before
        assert steps[0] == 1 or keep_bytes < 1 << 20
        before = files.number
        assert (metrics.newest()["train/loss"].value or 0) * 4 >= before


@EACH_LISTING
def test_rows_are_followed_whatever_a_listing_has(run: RunDir, monkeypatch: pytest.MonkeyPatch, rows: int, listing: str) -> None:
    metrics = Metrics(run, "train/loss")
    monkeypatch.setattr(metrics_read, "_POLL_S", 0.0)
    files = Rotation(run.metrics, monkeypatch, batch, last=9, keep_bytes=1 << 20, rows=rows, listing=listing)
    files.room, looks = 0, [0, 2, 1, 3, 2]

    def over() -> bool:
        files.write(looks.pop(0))
        files.room = 35
        return not looks

    assert [row.step for row in metrics.follow(over)] == list(range(10, files.number + 1))


def test_runs_with_strange_files_or_without_metrics_say_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run.metrics / "metrics.jsonl").unlink()
    (run.metrics / "metrics.jsonl").symlink_to(run.path)
    metrics = Metrics(run)
    assert [row.step for row in metrics.rows()], "a folder under the name is not read"
    for path in run.metrics.iterdir():
        path.unlink()
    with pytest.raises(ConfigError):
        Metrics(run)
    assert "no metrics yet" in refused(capsys, "metrics", "demo")


def test_an_example_becomes_a_folder_of_ones_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "  streamrl up mine/calculator.toml\n" in printed(capsys, "init", "mine", "--example", "calculator_tool")
    assert load(place / "mine" / "calculator.toml").producer.function.startswith(str(place / "mine"))
    assert main(["init"]) == 0
    assert load(place / "quickstart" / "quickstart.toml").run.name == "quickstart"
    told = printed(capsys, "init", "--example", "presets")
    assert "  streamrl up presets/grpo.toml --set model.path=DIR --set data.train=ROWS.jsonl\n" in told


def test_nothing_is_overwritten_and_what_cannot_be_copied_is_a_sentence(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "mine").mkdir()
    (place / "mine" / "train.jsonl").symlink_to("elsewhere.jsonl")
    assert "got train.jsonl" in refused(capsys, "init", "mine")
    assert [path.name for path in (place / "mine").iterdir()] == ["train.jsonl"] and not (place / "mine" / "elsewhere.jsonl").exists()
    said = refused(capsys, "init", "--example", "calculator")
    assert "'calculator_tool'" in said and ", ".join(example_names()) in said
    assert main(["init", "--example", "../examples"]) == 1 and main(["init", "--example", ""]) == 1
    (place / "file").write_text("mine")
    assert "got File exists: file" in refused(capsys, "init", "file")
    assert (place / "file").read_text() == "mine"


def test_the_schema_has_every_key_with_its_meaning() -> None:
    schema = config_schema()
    for name, values in sections(Config()):
        at = schema
        for part in name.split("."):
            at = at["properties"][part.removesuffix("[]")]
            at = at.get("items", at)
            at = schema["definitions"][at["$ref"].rpartition("/")[2]]
        assert set(at["properties"]) == {field.encode_name for field in msgspec.structs.fields(values)}
        assert at["additionalProperties"] is False
    assert schema["definitions"]["BusConfig"]["properties"]["patience_s"] == {
        "type": "number",
        "minimum": 0,
        "default": 60.0,
        "description": "How long an operation is retried while the bus is away.",
    }


def test_the_whole_configuration_is_printed_without_secrets(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "rows.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    reward = 'reward = { kind = "pkg.mod:score", options = { api_key = "tell-nobody" } }\n'
    (place / "my.toml").write_text('data.train = "rows.jsonl"\n' + reward)
    out = printed(capsys, "config", "my.toml", "--set", "run.steps=7")
    assert json.loads(out)["run"]["steps"] == 7 and "tell-nobody" not in out
    assert json.loads(printed(capsys, "config", "--schema")) == json.loads(json.dumps(config_schema()))
    for wrong in ([], ["my.toml", "--schema"]):
        assert "--schema" in refused(capsys, "config", *wrong)


@pytest.mark.process
def test_bash_completes_verbs_options_runs_and_nothing_that_runs(place: Path) -> None:
    (place / "runs" / "$(touch struck)").mkdir(parents=True)
    for run in ("runs/demo", "runs/$(touch struck)", "other/away"):
        (place / run).mkdir(parents=True, exist_ok=True)
        (place / run / "config.json").touch()
    (place / "completion.sh").write_text(completion_script(parser(), "bash"))
    asked = {
        "streamrl do": "down doctor",
        "streamrl dead ": "list show replay",
        "streamrl dead list ": "demo",
        "streamrl runs ": "rm note",
        "streamrl runs rm d": "demo",
        "streamrl runs rm demo --f": "--force",
        "streamrl dead show --o": "--out",
        "streamrl logs ": "demo",
        "streamrl logs d": "demo",
        "streamrl logs --dir other ": "away",
        "streamrl attach agent.py:agent --run ": "demo",
        "streamrl worker tr": "trainer",
        "streamrl init --example q": "quickstart",
        "streamrl completion ": "bash zsh",
        "streamrl up comp": "completion.sh",
    }
    script = ["set -u", "source ./completion.sh"]
    for line in asked:
        typed = " ".join(f"'{word}'" for word in line.split(" "))
        script += [f"COMP_WORDS=({typed})", "COMP_CWORD=$((${#COMP_WORDS[@]}-1))", "_streamrl", 'echo "${COMPREPLY[*]}"']
    done = subprocess.run(["bash", "-c", "\n".join(script)], cwd=place, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.stdout.splitlines() == list(asked.values()), done.stderr
    assert done.stderr == "" and not (place / "struck").exists()


def test_zsh_has_the_same_behind_its_bash_completion() -> None:
    bash, zsh = (completion_script(parser(), shell).splitlines() for shell in ("bash", "zsh"))
    assert [line for line in zsh if line not in bash] == [zsh[0], "autoload -Uz bashcompinit && bashcompinit"]


SAMPLED = ("--with", "evaluation.sampling={temperature=1.0,max_new_tokens=3}", "--with", "evaluation.n=2")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the verb in a folder with a table, a tiny Qwen3, and rows; gives its code, its JSON, and what it said of errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table").mkdir()
    write_table(tmp_path / "table", max_position=8)
    rows = [{"prompt": f"{number}+1", "label": str(number + 1)} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "empty.jsonl").write_text("")

    def _asked(*words: str) -> tuple[int, Any, str]:
        code = main(["eval", *words, "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else None, said.err

    return _asked


def test_a_directory_is_asked_once_and_goes_on_from_what_is_there(asked: Callable[..., Any], tmp_path: Path) -> None:
    words = ("table", "--set", "sums=rows.jsonl", "--set", "two=rows.jsonl@[0:2]", *SAMPLED)
    code, first, _ = asked(*words)
    assert code == 0
    assert [(one["set"], one["num"], one["samples"], one["failed"], one["version"], one["pinned"]) for one in first] == [
        ("sums", 6, 12, 0, "0.0", True),
        ("two", 2, 4, 0, "0.0", True),
    ]
    store = tmp_path / "evaluations" / "table" / "sums.jsonl"
    lines = store.read_bytes().splitlines(keepends=True)
    store.write_bytes(b"".join(lines[:4]) + lines[4][:9])  # as kill -9 leaves it
    _, again, _ = asked(*words)
    assert [one["resumed"] for one in again] == [3, 2]
    # The same seeds on the same weights: what was asked again is what was lost.
    assert sorted(store.read_bytes().splitlines()) == sorted(line.rstrip(b"\n") for line in lines)
    _, other, _ = asked(*words, "--with", "evaluation.n=3")
    assert [one["resumed"] for one in other] == [0, 0]
    assert len(list(store.parent.glob("sums.*.jsonl"))) == 1, "what was asked otherwise is set aside"


def test_rows_that_are_not_asked_are_told(asked: Callable[..., Any], tmp_path: Path) -> None:
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"prompt": "10000+1", "label": "10001"}\n')
    _, [found], error = asked("table", "--set", "sums=rows.jsonl", *SAMPLED, "--with", "evaluation.num_problems=4")
    assert found["num"] == 4
    assert "evaluation.sets[sums]: the first 4 of 7" in error
    _, [found], error = asked(
        "table", "--set", "sums=rows.jsonl", *SAMPLED, "--with", "data.max_prompt_tokens=4", "--with", "data.chat_template=false"
    )
    assert found["num"] == 6
    assert "evaluation.sets[sums]: 1 of 7" in error


def test_a_hugging_face_directory_is_served_by_the_local_engine(asked: Callable[..., Any], tmp_path: Path) -> None:
    write_qwen3(tmp_path / "qwen", ModelConfig(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16), seed=0)
    code, [one], _ = asked("qwen", "--set", "sums=rows.jsonl", *SAMPLED)
    assert (code, one["answered"], one["failed"]) == (0, 12, 0)
    assert 12 <= one["tokens"]["sum"] <= 36


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("table",), "expected sets of problems, got neither"),
        (("table", "--set", "rows.jsonl"), "expected --set NAME=PATH, got 'rows.jsonl'"),
        (("table", "--set", "a=no.jsonl"), "no such file"),
        (("table", "--set", "a=empty.jsonl"), "evaluation.sets[a]"),
        (("table", "--set", "a=rows.jsonl", "--set", "a=rows.jsonl"), "got 'a' twice"),
        (("table", "--set", "a=rows.jsonl", "--version", "3"), "--version is for runs"),
        (("table", "--set", "a=rows.jsonl", "--with", "evaluation.n=0"), "evaluation.n must be at least 1"),
        (("table", "--set", "a=rows.jsonl", "--with", "evaluation.n=2"), "they would all be the same"),
        (("table", "--set", "a=rows.jsonl", "--with", "reward.kind=exact"), "reward.kind must be"),
        (("nothing", "--set", "a=rows.jsonl"), "expected the name or directory of a run"),
        ((".", "--set", "a=rows.jsonl"), "expected a run or a model directory, got ."),
        (("hollow", "--set", "a=rows.jsonl"), "hollow, which has none"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "config.json").write_text('{"model_type": "qwen3"}')
    code, out, error = asked(*words)
    assert (code, out) == (1, None)
    assert said in error


def test_a_set_keeps_all_but_its_path_and_one_without_rows_is_named(tmp_path: Path) -> None:
    config = Config(data=DataConfig(train="x", heldout=str(tmp_path / "a.jsonl")))
    changed, [one] = with_sets(config, [f"heldout={tmp_path}/b.jsonl"])
    assert (one.name, one.path, changed.evaluation.sets) == ("heldout", f"{tmp_path}/b.jsonl", ())
    write_table(tmp_path, max_position=4)
    (tmp_path / "rows.jsonl").write_text("")
    _, [one] = with_sets(Config(data=DataConfig(train="x")), [f"none={tmp_path}/rows.jsonl"])
    with pytest.raises(DataError, match=r"evaluation\.sets\[none\]: expected"):
        load_set(one, load_tokenizer(tmp_path))
    assert problem_sets(Config()) == ()


def test_training_rows_of_a_configuration_are_not_looked_for(tmp_path: Path) -> None:
    """A file with several sources, which lie somewhere else."""
    write_table(tmp_path / "model", max_position=4)
    (tmp_path / "run.toml").write_text(
        '[data]\ncurriculum = "mine.py:weigh"\n[[data.sources]]\nname = "a"\ntrain = "/nowhere/rows.jsonl"\n'
        '[[evaluation.sets]]\nname = "s"\npath = "rows.jsonl"\n'
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "label": "2"}\n')
    config = config_of_directory(tmp_path / "model", tmp_path / "run.toml", [])
    assert config.data.sources == () and [one.name for one in problem_sets(config)] == ["s"]
