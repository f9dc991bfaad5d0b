"""Useful FLOPs of a step against sums written out by hand, and who has a peak."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import Shape, num_elements, shape_of, write_model
from streamrl.config.loss import CriticConfig, LossConfig
from streamrl.consumers.training.steps import speed
from streamrl.trainers import flops
from streamrl.trainers.flops import ModelFlops, flops_of, model_flops, peak_flops
from tests.support.trainers import Models, Rollouts, make


def found(shape: Shape, place: Path) -> ModelFlops | None:
    """Count those of transformers' model of a shape."""
    write_model(shape, place)
    with torch.device("meta"):
        return flops_of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place)))


@pytest.mark.parametrize("name", ["tiny", "0.6B", "8B"])
def test_the_body_of_a_dense_model_is_all_but_embedding_and_head(name: str, tmp_path: Path) -> None:
    shape = shape_of(name)
    embedding = shape.vocab * shape.hidden
    assert found(shape, tmp_path) == ModelFlops(
        body=num_elements(shape) - embedding * (1 if shape.tied else 2),
        head=embedding,
        attention=shape.layers * shape.heads * shape.head_dim,
    )


def test_a_token_meets_some_of_the_experts(tmp_path: Path) -> None:
    shape = shape_of("tiny-moe")
    experts = shape.layers * shape.experts * 3 * shape.hidden * shape.expert_intermediate
    idle = experts * (1 - shape.experts_per_token / shape.experts)
    told = found(shape, tmp_path)
    assert told is not None and told.body == num_elements(shape) - 2 * shape.vocab * shape.hidden - idle


def test_a_trainer_tells_the_time_at_its_peak(make_model: Models, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model_dir = rollouts(), make_model(dtype="bfloat16")
    result = make(model_dir, device="cpu", dtype="bfloat16").step(batch)
    assert result.peak_s is None and "train/mfu" not in speed(batch, result, 1.0, 2.0)
    monkeypatch.setattr(flops, "PEAKS", {"cpu": 1e9})
    result = make(model_dir, device="cpu", dtype="bfloat16").step(batch)
    # Of each of 2 layers: q, o, k, v; gate, up, down; four norms. One norm at the end, 16 tokens of 32 dimensions in the head.
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32 + 2 * 16
    body, head, lengths = 2 * layer + 32, 16 * 32, np.diff(batch.offsets)
    wanted = 6 * body * batch.num_tokens + 6 * head * batch.loss_mask.sum() + 6 * (2 * 32) * (lengths**2).sum()
    assert result.peak_s == pytest.approx(wanted / 1e9)
    assert speed(batch, replace(result, times={"perf/actor_train_time": 0.5}), 1.0, 2.0) == pytest.approx(
        {
            "perf/wait_s": 1.0,
            "perf/step_s": 2.0,
            "train/tokens_per_second": batch.num_tokens / 2,
            "train/mfu": wanted / 2e9,
            "perf/actor_train_time": 0.5,
            "perf/actor_train_tok_per_s": batch.num_tokens / 0.5,
        }
    )


def test_a_critic_that_learns_alone_is_no_policys_work(make_model: Models, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "PEAKS", {"cpu": 1e9})
    loss = LossConfig(advantage="ppo", critic=CriticConfig(only_steps=1))
    trainer = make(make_model(dtype="bfloat16"), loss, device="cpu", dtype="bfloat16")
    alone, both = trainer.step(rollouts(0)), trainer.step(rollouts(1))
    assert alone.peak_s is None and both.peak_s is not None


def test_what_is_counted_and_what_cannot_be() -> None:
    counted = ModelFlops(body=1000, head=300, attention=20)
    # Samples of 3 and 5 tokens: 8 through the body, 4 trained through the head; (9 + 25) / 2 pairs, 4 FLOPs each and dimension, thrice.
    assert counted.step(np.array([3, 5], np.int64), 4) == 6 * 1000 * 8 + 6 * 300 * 4 + 3 * 4 * 20 * (9 + 25) / 2
    assert counted.step(np.zeros(0, np.int64), 0) == 0
    # Squares of int32 lengths would overflow.
    assert counted.step(np.array([60_000], np.int32), 0) == 6 * 1000 * 6e4 + 6 * 20 * 3.6e9
    sizes = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 3}
    assert model_flops(SimpleNamespace(**sizes), [("a", 5)], 7) == ModelFlops(body=5, head=7, attention=3 * 2 * 4)
    assert model_flops(SimpleNamespace(**sizes), [("layers.0.mlp.experts.up", 5)], 7) is None
    assert model_flops(SimpleNamespace(**sizes, layer_types=["full_attention", "sliding_attention"]), [("a", 5)], 7) is None
    assert model_flops(SimpleNamespace(**sizes, sliding_window=4), [("a", 5)], 7) is None
    # DeepSeek-V3's head_dim is that of the rotated part alone.
    assert model_flops(SimpleNamespace(**sizes, kv_lora_rank=4, qk_nope_head_dim=2, head_dim=1), [("a", 5)], 7) is None
    assert model_flops(SimpleNamespace(**sizes | {"num_attention_heads": None}), [("a", 5)], 7) is None
    assert peak_flops("NVIDIA H200", "bfloat16") == peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") is None and peak_flops("cpu", "bfloat16") is None
