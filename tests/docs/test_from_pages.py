"""The pages for who comes from another system: their files are loaded and fit GPUs, and their rows are held to files and keys."""

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.docs.configuration import sections
from streamrl.config.load import convert, load
from streamrl.config.registry import ESTIMATORS, POLICY_LOSSES
from streamrl.config.reward_kinds import named
from streamrl.config.tree import Config, DataConfig
from streamrl.data.problems import read_problem
from streamrl.data.rows import open_rows
from streamrl.rewards.functions import as_value
from tests.support.blocks import blocks
from tests.support.plans import plan, write_model

ROOT = Path(__file__).parents[2]
PAGES = {
    "from-slime": ("Qwen3-4B", "H100"),
    "from-verl": ("Qwen3-4B", "H100"),
    "from-prime-rl": ("DeepSeek-R1-Distill-Qwen-1.5B", "H100"),
    "from-trl": ("Qwen3-0.6B", "H100"),
}
"""The model of each page's run, and GPUs that hold it."""
SECTIONS = {name for name, _ in sections(Config())}
KEYS = {f"{name}.{key}" for name, struct in sections(Config()) for key in struct.__struct_fields__} - SECTIONS
TABLES = ("engine.sglang.flags", "producer.options")
"""Keys that hold a table of names of others."""
MISSING = ("lora", "fp8", "vllm", "colocate", "offload", "muon", "draft", "kto", "dpo")
"""Words that no key may have while the pages say that the thing is not there."""
NAMES: dict[str, Callable[[str], object]] = {"loss.advantage": ESTIMATORS.get, "loss.policy": POLICY_LOSSES.get, "reward.kind": named}
"""Keys whose values are names of a table of ours, unless they are functions."""
_SETTING = re.compile(r"`((?:[a-z_]+(?:\[\])?\.)+[a-z_0-9]+)(?: = ([^`]+))?`")


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def rows(name: str, mark: str) -> list[list[str]]:
    found = re.search(rf"<!-- {mark}: begin -->\n(.*?)<!-- {mark}: end -->", page(name), re.DOTALL)
    assert found, f"{name}: no marks {mark}"
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in found[1].splitlines()[2:]]


def settings(cell: str) -> list[tuple[str, str | None]]:
    """Keys of a cell, each with the text of its value, if it has one."""
    return [(key, value) for key, value in _SETTING.findall(cell.replace("``", ""))]


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a TOML file; of a list of tables with one table, as `list[].key`."""
    for name, value in tree.items():
        key = prefix + name
        if key in (*SECTIONS, *TABLES):
            yield from leaves(value, f"{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            [only] = value
            yield from leaves(only, f"{key}[].")
        else:
            yield key, value


def toml_of(name: str) -> str:
    [block] = [block for block in blocks(ROOT / "docs" / f"{name}.md") if block.language == "toml"]
    return block.text


@pytest.mark.parametrize("name", PAGES)
def test_the_rows_of_the_same_run_are_the_file(name: str) -> None:
    written = dict(leaves(tomllib.loads(toml_of(name))))
    del written["run.name"]
    told: dict[str, Any] = {}
    for cells in rows(name, "same run"):
        assert len(cells) == 3, cells
        for key, value in settings(cells[1]):
            assert key not in told, key
            told[key] = tomllib.loads(f"value = {value}")["value"]
    assert told == written


@pytest.mark.parametrize("name", PAGES)
def test_the_same_run_is_taken_and_fits_its_gpus(name: str, tmp_path: Path) -> None:
    model, gpu = PAGES[name]
    write_model(tmp_path, model)
    tree = tomllib.loads(toml_of(name))
    named = [tree["data"]["train"], tree["data"].get("heldout", ""), *(one["path"] for one in tree.get("evaluation", {}).get("sets", ()))]
    for rows_file in filter(None, named):
        (tmp_path / rows_file.partition("@")[0]).write_text('{"prompt": "1+1=", "label": "2"}\n')
    (tmp_path / "python").touch(mode=0o755)
    (tmp_path / "reward.py").touch()
    (tmp_path / "run.toml").write_text(re.sub(r'python = "[^"]*"', 'python = "python"', toml_of(name)))
    config = load(tmp_path / "run.toml")
    assert config.model.path == str(tmp_path / model)
    assert {check.name for check in plan(config, gpu).values() if check.state == "fail"} == set()
    assert config.data.max_prompt_tokens + config.sampling.max_new_tokens <= config.model.max_len


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("mark", ["same run", "options"])
def test_every_key_is_there_and_takes_its_value(name: str, mark: str) -> None:
    for cells in rows(name, mark):
        assert len(cells) == 3, cells
        found = settings(cells[1])
        assert found or cells[1] == "-", cells
        for key, value in found:
            table = key.startswith(tuple(f"{one}." for one in TABLES))
            assert table or key in KEYS | SECTIONS, f"{name}: {key}"
            if value and not table and "[]" not in key and not re.fullmatch(r"[A-Z]", value):
                convert(tomllib.loads(f"{key} = {value}"), where=name)
            if value and key in NAMES and ":" not in value:
                assert NAMES[key](value.strip('"')), f"{name}: {key} = {value}"


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_calls_missing_is(name: str) -> None:
    told = " ".join(" ".join(cells) for cells in rows(name, "missing")).lower()
    for needed in ("lora", "vision models", "fp8", "far engines", "draft weights"):
        assert needed in told, f"{name}: {needed}"
    there = {key for key in KEYS for word in MISSING if word in re.split(r"[._]", key)}
    assert not there, f"{there}: the pages docs/from-*.md say that this is not there"


def test_the_setting_of_a_cell_is_found() -> None:
    assert settings('`loss.policy = "gspo"`, `evaluation.sets[].n = 4`, `data.sources`, `--x`') == [
        ("loss.policy", '"gspo"'),
        ("evaluation.sets[].n", "4"),
        ("data.sources", ""),
    ]
    assert "evaluation.sets[].n" in KEYS and "loss.policy" in KEYS
    with pytest.raises(Exception, match="learning_rat") as caught:
        convert(tomllib.loads("trainer.optimizer.learning_rat = 1"), where="x")
    assert not isinstance(caught.value, msgspec.ValidationError)


def test_verls_rows_become_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows_of_verl = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{number} + 1?"}],
            "reward_model": {"ground_truth": str(number + 1), "style": "rule"},
            "extra_info": {"index": number},
        }
        for number in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(rows_of_verl), "verl.parquet")
    [block] = [block for block in blocks(ROOT / "docs" / "from-verl.md") if block.language == "python"]
    exec(block.text, {})
    config = DataConfig(train="train.parquet", metadata_key="extra_info")
    found = open_rows("train.parquet")
    problems = [read_problem(found[row], config, row_number=row, line=found.line(row), path=found.path) for row in range(2)]
    assert [(one.label, one.metadata, one.prompt[0]["content"]) for one in problems] == [
        ("1", {"index": 0}, "0 + 1?"),
        ("2", {"index": 1}, "1 + 1?"),
    ]


def test_the_reward_for_trls_users_keeps_its_parts() -> None:
    [block] = [block for block in blocks(ROOT / "docs" / "from-trl.md") if block.language == "python"]
    found: dict[str, Any] = {}
    exec(block.text, found)
    right, wrong = (as_value(found["score"](SimpleNamespace(label="45"), SimpleNamespace(completion=text))) for text in (" 45", "5" * 2000))
    assert (right.value, right.parts) == (pytest.approx(1.1), {"correct": 1.0, "brief": 0.1})
    assert (wrong.value, wrong.parts) == (0.0, {"correct": 0.0, "brief": 0.0})
