"""The example as a user runs it on a CPU: local engine, table engine, reports; and what its files promise for GPUs."""

import csv
import importlib
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from streamrl.config.load import load
from streamrl.config.tree import ModelConfig
from streamrl.data.model import write_qwen3
from streamrl.history.evaluate import config_of_directory, with_sets
from streamrl.rewards.numbers import final_answer
from tests.support.pythons import python

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"
SMALL = ("model.hidden=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.intermediate=48")


def read(name: str) -> list[dict[str, Any]]:
    return pq.read_table(EXAMPLE / f"{name}.parquet").to_pylist()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the example, whose folder is no package."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module


@pytest.mark.parametrize(("name", "num"), [("train", 7473), ("test", 1319)])
def test_every_answer_is_the_final_number_of_its_solution(name: str, num: int) -> None:
    rows = read(name)
    assert len(rows) == num
    for row in rows:
        answer = final_answer(row["label"])
        assert answer is not None and answer.marked and answer.value == Fraction(row["answer"])
        assert row["prompt"] and "<<" not in row["label"]


def test_the_short_rows_are_those_of_the_training_file() -> None:
    short = [json.loads(line) for line in (EXAMPLE / "short.jsonl").read_text().splitlines()]
    train = read("train")
    assert all(row in train for row in short)
    longest = max(len(row["prompt"]) + len(row["label"]) for row in short)
    assert sum(len(row["prompt"]) + len(row["label"]) < longest for row in train) < len(short)


@pytest.mark.process
def test_prepare_makes_the_rows(tmp_path: Path) -> None:
    lines = [
        {"question": "How many? ", "answer": "He has 6*7 = <<6*7=42>>42 apples.\n#### 42"},
        {"question": "How much?", "answer": "It is 1,000 + 234 = $<<1000+234=1234>>1,234.\n#### 1,234"},
    ]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    out.mkdir()
    python(tmp_path, EXAMPLE / "prepare.py", tmp_path, out)
    rows = [
        {"prompt": "How many?", "label": "He has 6*7 = 42 apples.\n#### 42", "answer": "42"},
        {"prompt": "How much?", "label": "It is 1,000 + 234 = $1,234.\n#### 1,234", "answer": "1234"},
    ]
    assert pq.read_table(out / "train.parquet").to_pylist() == rows
    assert [json.loads(line) for line in (out / "short.jsonl").read_text().splitlines()] == rows
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "?", "answer": "no number"}) + "\n")
    with pytest.raises(AssertionError, match="#### number"):
        python(tmp_path, EXAMPLE / "prepare.py", tmp_path, out)


@pytest.mark.parametrize("name", ["gsm8k", "tail"])
def test_on_gpus_the_engine_has_one_and_the_trainer_another(name: str) -> None:
    config = load(EXAMPLE / f"{name}.toml")
    assert (config.engine.kind, config.engine.sglang.gpus) == ("sglang", (1,))
    assert (config.weights.transport, config.model.dtype) == ("ipc", "bfloat16")


def test_real_weights_need_a_path_and_the_overrides_of_the_readme(tmp_path: Path) -> None:
    """A directory as a download makes it: configuration, weights, tokenizer."""
    write_qwen3(tmp_path / "Qwen3", ModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=48), seed=0)
    [block] = re.findall(r"```console\n(\$ streamrl up [^`]*model\.path=[^`]*)```", (EXAMPLE / "README.md").read_text())
    one, two, evaluated = block.strip().split("\n")
    for command, file in ((one, "one_gpu.toml"), (two, "gsm8k.toml")):
        assert f"examples/gsm8k/{file} " in command
        given = re.sub(r"/models/Qwen3-\S+", str(tmp_path / "Qwen3"), command).replace("=train.parquet", f"={EXAMPLE}/train.parquet")
        config = load(EXAMPLE / file, re.findall(r"--set (\S+)", given))
        assert (config.model.path, config.warmup.max_steps) == (str(tmp_path / "Qwen3"), 0)
    assert "--config examples/gsm8k/gsm8k.toml" in evaluated
    config = config_of_directory(tmp_path / "Qwen3", EXAMPLE / "gsm8k.toml", re.findall(r"--with (\S+)", evaluated))
    _, [asked] = with_sets(config, [f"gsm8k={EXAMPLE}/test.parquet"])
    assert (asked.n, asked.num_problems, asked.sampling.temperature, asked.sampling.max_new_tokens) == (8, 1319, 1.0, 1024)
    assert asked.config.reward.kind == "gsm8k"


def test_lengths_belong_to_rows_and_have_a_heavy_tail(example: Any) -> None:
    length = example("tail").length
    config = load(EXAMPLE / "tail.toml")
    options = {**config.producer.options, "longest": config.sampling.max_new_tokens}
    assert options == {"median": 64.0, "sigma": 1.4, "longest": 2048}
    drawn = np.array([[length(row, k, **options) for k in range(8)] for row in range(480)])
    assert drawn[3, 5] == length(3, 5, **options)
    assert 54 < np.median(drawn) < 75
    assert drawn.max() == 2048 and drawn.min() >= 1
    batches = drawn.reshape(-1, config.tasks.batch_tasks * 8)
    assert np.mean(batches.max(axis=1) / batches.mean(axis=1)) > 9


@pytest.mark.nats
@pytest.mark.soak
def test_the_loop_runs_on_a_cpu_and_is_reported(tmp_path: Path) -> None:
    limits = ("run.steps=4", "warmup.max_steps=6", "evaluation.num_problems=4", "sampling.max_new_tokens=24", "tasks.batch_tasks=8")
    sets = [word for text in (*SMALL, *limits) for word in ("--set", text)]
    python(tmp_path, "-m", "streamrl", "up", EXAMPLE / "local.toml", "--plain", *sets)
    said, _ = python(tmp_path, EXAMPLE / "report.py", "gsm8k-local")
    run = tmp_path / "runs" / "gsm8k-local"
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    assert (run / "report.md").read_text() in said and "4 batches, 256 rollouts in" in said and "held-out accuracy:" in said
    assert (run / "report.png").stat().st_size > 10_000
    with (run / "versions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["version"]) for row in rows] == list(range(int(rows[0]["version"]), int(rows[0]["version"]) + 4))
    assert int(rows[0]["version"]) >= 7
    assert any(row["|dlogp| same weights max"] for row in rows)
    for row in rows:
        assert float(row["|dlogp| all max"]) >= float(row["|dlogp| all mean"]) >= 0
        # Float32 on both sides: what is left of the distance under the same weights is rounding.
        # A batch whose samples all met a swap has none of one age.
        assert float(row["|dlogp| same weights max"] or 0) < 1e-3
        assert float(row["trained tok/s"]) > 0


@pytest.mark.nats
@pytest.mark.soak
def test_async_and_lockstep_train_the_same_rollouts(tmp_path: Path) -> None:
    sets = ("--set", "run.steps=5", "--set", "debug.token_delay_s=0.004")
    said, _ = python(tmp_path, EXAMPLE / "async_vs_lockstep.py", "--out", tmp_path / "table.md", *sets)
    table = (tmp_path / "table.md").read_text()
    assert table in said
    cells = {label: values for label, *values in (line.strip("| ").split(" | ") for line in table.splitlines()[2:])}
    # Five batches of 64 rollouts, the first of which is left out.
    assert (cells["batches before the steady part (not counted)"][:2], cells["rollouts"][:2]) == (["1", "1"], ["256", "256"])
    assert all(float(value) > 0 for value in cells["tokens of a rollout, mean"][:2])
    for rate in ("batches/s", "rollouts/s in the second half", "tokens/s trained (without prompts)"):
        assert float(cells[rate][2].strip(" |")) > 0
    assert (cells["age of trained tokens, max"][1].strip(), cells["rollouts dropped"][:2]) == ("0", ["0", "0"])
    # What the sampler and the trainer say of one token under the same table differs by float32's rounding.
    assert float(cells["the same: max"][1]) < 1e-5
    for name in ("tail-local-async", "tail-local-lockstep"):
        assert (tmp_path / "runs" / name / "report.png").is_file()
