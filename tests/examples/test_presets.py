"""The presets, with a tiny model in the place of the real one: accepted as they are, and trained from for three batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.load import load
from streamrl.config.tree import ModelConfig
from streamrl.core.batches import TrainBatch
from streamrl.data.model import write_qwen3
from streamrl.doctor.machine import examine_plan
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import METRICS
from streamrl.trainers.factory import make_trainer
from tests.support.plans import GPUS, plan, reckoned, write_model

EXAMPLES = Path(__file__).parents[2] / "examples"
PRESETS = sorted((EXAMPLES / "presets").glob("*.toml"))
ROWS = f"data.train={EXAMPLES}/quickstart/train.jsonl"


def batch(step: int) -> TrainBatch:
    """Four groups of two answers, of which one is right."""
    rng, samples = np.random.default_rng(step), range(8)
    prompts, answers = rng.integers(3, 13, (8, 3)).tolist(), rng.integers(3, 13, (8, 4)).tolist()
    given: Any = {"rewards": [k % 2 for k in samples], "tasks": [k // 2 for k in samples], "rollouts": [k % 2 for k in samples]}
    given |= {"sampler_logprobs": [[-2.5] * 4] * 8, "staleness": [[step] * 4] * 8, "version": Version(0, step)}
    return TrainBatch.from_lists(prompts, answers, stage_step=step, **given)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_are_known_and_pass_the_checks_of_a_plan(preset: Path) -> None:
    assert [path.stem for path in PRESETS] == ["grpo", "grpo_70b", "ppo"]
    checks = examine_plan(str(preset), ["data.train=rows.parquet", "model.path=DIR"])
    assert {check.state for check in checks} == {"ok"}, checks
    assert "fail" in {check.state for check in examine_plan(str(preset), ["data.train=rows.parquet", "loss.reduction=mean"])}


@pytest.mark.parametrize(
    ("preset", "model", "gpu", "states"),
    [
        ("grpo", "Qwen3-1.7B", "H100", ("ok", "ok")),
        ("grpo", "Qwen3-4B", "H200", ("ok", "ok")),
        ("grpo", "Qwen3-4B", "H100", ("ok", "warn")),
        ("ppo", "Qwen3-1.7B", "H200", ("ok", "ok")),
        ("ppo", "Qwen3-4B", "H200", ("fail", "warn")),
        ("grpo_70b", "Llama-3.3-70B-Instruct", "B300", ("ok", "ok")),
        ("grpo_70b", "Qwen2.5-72B-Instruct", "B300", ("ok", "ok")),
        ("grpo_70b", "Llama-3.3-70B-Instruct", "H200", ("fail", "warn")),
    ],
)
def test_the_doctor_says_which_model_a_preset_fits(preset: str, model: str, gpu: str, states: tuple[str, str], tmp_path: Path) -> None:
    config = load(EXAMPLES / "presets" / f"{preset}.toml", [ROWS, f"model.path={write_model(tmp_path, model)}"])
    checks = plan(config, gpu)
    assert (checks["trainer memory"].state, checks["activations"].state) == states
    assert ("backend" in checks, "shared gpu" in checks) == (preset == "grpo_70b",) * 2
    others = {name: check.state for name, check in checks.items() if name not in ("trainer memory", "activations", "shared gpu")}
    assert set(others.values()) <= {"ok"}
    if "shared gpu" in checks:
        assert (checks["shared gpu"].state == "ok") == (gpu == "B300")
        assert config.loss == load(EXAMPLES / "presets" / "grpo.toml", [ROWS, f"model.path={tmp_path / model}"]).loss


@pytest.mark.parametrize("preset", [path for path in PRESETS if path.stem != "grpo_70b"], ids=lambda path: path.stem)
def test_a_preset_is_accepted_and_trains(preset: Path, tmp_path: Path) -> None:
    write_qwen3(tmp_path, ModelConfig(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=24), seed=0)
    critic = ("loss.critic.only_steps=2",) if preset.stem == "ppo" else ()
    config = load(preset, [ROWS, f"model.path={tmp_path}", "trainer.device=cpu", "trainer.optimizer.warmup_steps=0", *critic])
    assert config.run.name == config.loss.advantage == preset.stem
    assert config.engine.kind == "sglang" and config.trainer.gpu not in config.engine.sglang.gpus
    trainer = make_trainer(config, tmp_path)
    digests: list[str] = []
    for step in range(3):
        result = trainer.step(batch(step))
        assert result.finite and set(result.metrics) <= set(METRICS)
        digests.append(result.digest)
    assert (digests[0] == digests[1]) == (preset.stem == "ppo"), "the critic alone is trained first"
    assert digests[1] != digests[2]


TABLE = (EXAMPLES.parent / "docs" / "megatron.md").read_text().partition("<!-- 70b: begin -->\n")[2].partition("<!-- 70b: end -->")[0]
ELSEWHERE = ("ray.address=auto", "bus.host=0.0.0.0", "engine.host=0.0.0.0", "engine.sglang.gpus=[]", "weights.transport=bus")


@pytest.mark.parametrize("row", TABLE.splitlines()[2:])
def test_what_a_70b_takes_is_what_the_page_says(row: str, tmp_path: Path) -> None:
    gpu, seen, tensor, pipeline, ranks, llama, qwen, layers, on = (cell.strip() for cell in row.strip("|").split("|"))
    mesh = [f"trainer.tensor={tensor}", f"trainer.pipeline={pipeline}", f"trainer.ranks={ranks}", *(ELSEWHERE if on != "one host" else ())]
    for name, gib in (("Llama-3.3-70B-Instruct", llama), ("Qwen2.5-72B-Instruct", qwen)):
        given = [ROWS, f"model.path={write_model(tmp_path, name)}", *mesh]
        checks = plan(load(EXAMPLES / "presets" / "grpo_70b.toml", given), gpu)
        assert {check.state for check in checks.values()} == {"ok"}
        assert reckoned(checks) == float(gib)
        assert name.startswith("Qwen") or checks["activations"].found.startswith(f"{layers} layers")
    assert GPUS[gpu] == float(seen)
