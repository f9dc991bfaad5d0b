from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from scripts.docs.configuration import sections
from streamrl.cli import main, parser
from streamrl.cli.completion import completion_script
from streamrl.cli.examples import example_names
from streamrl.config.load import load
from streamrl.config.schema import config_schema
from streamrl.config.tree import Config


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_example_becomes_a_folder_of_ones_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine", "--example", "calculator_tool"]) == 0
    assert "  streamrl up mine/calculator.toml\n" in capsys.readouterr().out
    assert load(place / "mine" / "calculator.toml").producer.function.startswith(str(place / "mine"))
    assert main(["init"]) == 0
    assert load(place / "quickstart" / "quickstart.toml").run.name == "quickstart"
    assert main(["init", "--example", "presets"]) == 0
    assert "  streamrl up presets/grpo.toml --set model.path=DIR --set data.train=ROWS.jsonl\n" in capsys.readouterr().out


def test_nothing_is_overwritten_and_what_cannot_be_copied_is_a_sentence(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "mine").mkdir()
    (place / "mine" / "train.jsonl").symlink_to("elsewhere.jsonl")
    assert main(["init", "mine"]) == 1
    assert "got train.jsonl" in capsys.readouterr().err
    assert [path.name for path in (place / "mine").iterdir()] == ["train.jsonl"] and not (place / "mine" / "elsewhere.jsonl").exists()
    assert main(["init", "--example", "calculator"]) == 1
    said = capsys.readouterr().err
    assert "'calculator_tool'" in said and ", ".join(example_names()) in said
    assert main(["init", "--example", "../examples"]) == 1 and main(["init", "--example", ""]) == 1
    (place / "file").write_text("mine")
    assert main(["init", "file"]) == 1
    assert "got File exists: file" in capsys.readouterr().err
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
    assert main(["config", "my.toml", "--set", "run.steps=7"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["run"]["steps"] == 7 and "tell-nobody" not in out
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(config_schema()))
    for wrong in ([], ["my.toml", "--schema"]):
        assert main(["config", *wrong]) == 1
        assert "--schema" in capsys.readouterr().err


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
