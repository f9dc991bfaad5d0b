"""`streamrl eval` on model directories, in this process, on the table engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli import main
from streamrl.config.evaluation_sets import problem_sets
from streamrl.config.tree import Config, DataConfig, ModelConfig
from streamrl.data.model import write_qwen3, write_table
from streamrl.data.problem_sets import load_set
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import DataError
from streamrl.history.evaluate import config_of_directory, with_sets

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
