"""`streamrl import-slime` and `streamrl doctor --plan` as users call them."""

import json
import tomllib
from pathlib import Path

import pytest

from streamrl.bridges.slime.known import HOOKS, REFUSED
from streamrl.bridges.slime.script.explain import explain
from streamrl.bridges.slime.script.flag import canonical
from streamrl.bridges.slime.script.flags import FLAGS
from streamrl.cli import main
from streamrl.config.load import convert
from streamrl.errors import ConfigError
from tests.bridges.slime.recipes import QWEN3_4B, script, without
from tests.support.errors import raises
from tests.support.printed import printed


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.sh"
    path.write_text(script(QWEN3_4B))
    return path


def test_a_script_becomes_a_file_that_the_doctor_takes(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "import-slime", "train.sh", "-o", "my.toml")
    assert said.out == "" and "approximated:" in said.err and "written: my.toml" in said.err
    assert "ready" in printed(capsys, "doctor", "my.toml", "--plan").out
    [check] = json.loads(printed(capsys, "doctor", "my.toml", "--plan", "--set", "tasks.batch_tasks=0", "--json", code=1).out)
    assert check["state"] == "fail" and "tasks.batch_tasks" in check["found"]
    assert "my.toml" in printed(capsys, "import-slime", "train.sh", "-o", "my.toml", code=1).err


def test_the_toml_goes_to_stdout_and_the_report_does_not(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tomllib.loads(printed(capsys, "import-slime", "train.sh").out)["run"]["steps"] == 3000
    done = json.loads(printed(capsys, "import-slime", "train.sh", "--json").out)
    assert tomllib.loads(done["toml"])["tasks"]["batch_tasks"] == 32
    assert {"approximated", "assumed"} <= {one["outcome"] for one in done["report"]["findings"]}


def test_what_is_refused_writes_nothing_until_it_is_left_out(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.write_text(script({**QWEN3_4B, "use-stateless-adam": "", "num-rolout": "1"}))
    said = printed(capsys, "import-slime", "train.sh", "-o", "my.toml", code=1).err
    assert "--use-stateless-adam: " in said and "did you mean --num-rollout?" in said
    assert not Path("my.toml").exists()
    assert main(["import-slime", "train.sh", "--leave-out", "use-stateless-adam"]) == 1
    assert main(["import-slime", "train.sh", "-o", "my.toml", "--leave-out", "use-stateless-adam", "--leave-out=--num-rolout"]) == 0
    assert "# left out: " in Path("my.toml").read_text()
    assert "--leave-out use-tis: " in printed(capsys, "import-slime", "train.sh", "--leave-out", "use-tis", code=1).err


def test_variables_arguments_and_rows_are_given_on_the_command_line(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {**without(QWEN3_4B, "num-rollout"), "num-epoch": "${1:-1}", "hf-checkpoint": "$BASE/Qwen3-4B"}
    train.write_text(script(arguments))
    said = printed(capsys, "import-slime", "train.sh", code=1).err
    assert "BASE is not set" in said and "--var BASE=VALUE" in said and "--rows N" in said
    written = tomllib.loads(printed(capsys, "import-slime", "train.sh", "2", "--var", "BASE=/data", "--rows", "1000").out)
    assert written["model"]["path"] == "/data/Qwen3-4B" and written["run"]["steps"] == 2 * 1000 // 32
    for wrong in (["--var", "BASE"], ["--var", "1=2"], ["--rows", "-3"]):
        assert main(["import-slime", "train.sh", *wrong]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo python train.py\n", "expected a command that runs slime's train.py or train_async.py, got none"),
        ("exit 1\npython train.py\n", "it ends with exit at"),
        ("python train.py --a\npython train.py --b\n", "expected one training command, got 2"),
        ("if [ -e x ]; then python train.py; fi\n", "is run only if the condition at"),
        ("python train.py --num-rollout 1\n--global-batch-size 4\n", "a \\ at the end of the line before it is missing"),
        ("python train.py x --colocate\n", "stands before the first flag"),
        ("python train.py ${ARGS[@]} $(cat args)\n", "these words are not known: $(cat args) is what a command prints"),
    ],
)
def test_a_script_without_one_training_command_is_refused(train: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    train.write_text(text)
    assert said in printed(capsys, "import-slime", "train.sh", code=1).err


def test_a_name_in_a_script_cannot_command_the_terminal_or_the_file(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.write_text(script({**QWEN3_4B, "wandb-group": "$'a\\nb = 1'", "hf-checkpoint": "\"$'\x1b[2J'/m\"", "x\x1b[31m": ""}))
    said = printed(capsys, "import-slime", "train.sh", "--leave-out", "all")
    assert "\x1b" not in said.err and "\x1b" not in said.out
    assert "b" not in tomllib.loads(said.out)


def test_each_flag_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "import-slime", "--explain", "--tis-clip", "rollout_batch_size", "--sglang-mem-fraction-static=0.7").out
    assert "--tis-clip: mapped to loss.correction.high" in said and "default of slime: 2.0" in said
    assert "--rollout-batch-size: mapped to tasks.batch_tasks" in said
    assert "--sglang-mem-fraction-static: mapped to engine.sglang.flags.mem_fraction_static" in said
    assert "slime calls it --tis-clip" in explain("--tis-threshold") and "loss.correction.high" in explain("--tis-threshold")
    assert all(explain(name).startswith(f"{name}: ") for name in FLAGS)
    with raises(ConfigError, flag="--tis-clp") as caught:
        explain("--tis-clp")
    assert caught.value.hint == "did you mean --tis-clip?"
    assert main(["import-slime", "--explain"]) == 1 and main(["import-slime"]) == 1


def test_every_key_in_the_table_is_one_of_the_configuration() -> None:
    for flag in FLAGS.values():
        for key in flag.keys:
            *sections, name = key.removeprefix("evaluation.sets[].").split(".")
            tree = _nested(sections, name)
            if "[]" in key:
                tree = {"evaluation": {"sets": [tree]}}
            try:
                convert(tree, where="the table")
            except ConfigError as error:
                assert "expected a known key" not in error.message, f"{flag.name}: {key}"


def _nested(sections: list[str], name: str) -> dict[str, object]:
    tree: dict[str, object] = {name: None}
    for section in reversed(sections):
        tree = {section: tree}
    return tree


def test_every_hook_is_a_key_of_its_name_or_refused_with_the_reason() -> None:
    for name, hook in HOOKS.items():
        flag = FLAGS[canonical(name)]
        assert flag.fate in ("mapped", "approximated")
        assert f"slime.{name}" in flag.keys or flag.keys == (hook.becomes,)
    for name, (reason, nearest) in REFUSED.items():
        flag = FLAGS[canonical(name)]
        assert (flag.fate, flag.says, flag.nearest) == ("refused", reason, nearest)
