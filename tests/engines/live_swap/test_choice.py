"""The way in which a rank swaps: by what of its model no version reaches, and by what SGLang sizes its KV cache by."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from streamrl.engines.live_swap.messages import Rank, Settings
from streamrl.engines.sglang.host import problem_of
from streamrl.engines.sglang.plugin.rank import choose, memory_short

GB = 1_000_000_000


def test_a_trainer_on_the_same_gpu_is_not_counted_twice() -> None:
    # 80 GB, of which a trainer had 30 before the server began: SGLang leaves 60 % of the other 50 free, and 18.6 are left for its cache.
    assert memory_short(int(48.8 * GB), 50 * GB, int(1.2 * GB), fraction=0.4, reserve=0.05) == ""
    # What the trainer has taken since then is gone.
    assert memory_short(int(31.2 * GB), 50 * GB, int(1.2 * GB), fraction=0.4, reserve=0.05)


def test_a_buffer_that_leaves_no_cache_is_named() -> None:
    said = memory_short(62 * GB, 80 * GB, 18 * GB, fraction=0.4, reserve=0.05)
    assert "18.0 GB would leave 0.0 GB" in said and "0.4 of 80.0 GB, 4.0 GB wanted" in said
    assert memory_short(62 * GB, 80 * GB, 10 * GB, fraction=0.5, reserve=0.05) == ""


class Module(nn.Module):
    """A module with what SGLang's have, by name: parameters, buffers, and plain attributes."""

    def __init__(self, *, parameters: Sequence[str] = (), buffers: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__()
        for name in parameters:
            self.register_parameter(name, nn.Parameter(torch.randn(4, 4), requires_grad=False))
        for name in buffers:
            self.register_buffer(name, torch.randn(4), persistent=False)
        for name, value in attributes.items():
            setattr(self, name, value)


def runner(inner: nn.Module) -> Any:
    model = nn.Sequential()
    model.add_module("embed", Module(parameters=["weight"]))
    model.add_module("layer", inner)
    return SimpleNamespace(model=model, model_config=None, server_args=SimpleNamespace(pp_size=1, dp_size=1, quantization=None))


@pytest.mark.parametrize(
    ("inner", "tensor"),
    [
        pytest.param(Module(parameters=["weight", "e_score_correction_bias"]), "layer.e_score_correction_bias", id="GLM-4.5, DeepSeek-V3"),
        pytest.param(
            Module(parameters=["weight"], w_kc=torch.randn(2, 3, 4), w_vc=torch.randn(2, 4, 3)), "layer.w_kc and 1 more", id="MLA"
        ),
        pytest.param(Module(parameters=["weight"], buffers=["gemma_weight"]), "layer.gemma_weight", id="Gemma 2, Qwen3-Next: weight + 1"),
        pytest.param(Module(parameters=["weight"], parts=[torch.randn(2, 4)]), "layer.parts", id="in a list"),
        pytest.param(
            Module(parameters=["w13_weight"], quant_method=SimpleNamespace(use_flashinfer_trtllm_moe=True)),
            "moe_runner_backend",
            id="order",
        ),
    ],
)
def test_what_a_version_would_not_reach_rules_the_plugin_out(inner: nn.Module, tensor: str) -> None:
    """Whatever was asked for: copied in place it would be as untrue as flipped."""
    for swap in ("auto", "flip", "copy"):
        choice = choose(Settings(dir="", swap=swap), runner(inner))
        assert choice.swap == "none" and tensor in choice.why
    ranks = (Rank(rank=0, size=1, pid=1, device="cpu", sglang="0.5.17", swap=choice.swap, why=choice.why, buffer_nbytes=0),)
    assert tensor in problem_of(ranks, "flip") and tensor in problem_of(ranks, "auto")


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(Module(parameters=["weight", "bias"], w_kc=None, w_vc=None), id="latent attention before its weights"),
        pytest.param(Module(buffers=["cos_sin_cache", "long_cos_sin_cache", "inv_freq", "cos_sin_q_cache"]), id="rotary tables"),
        pytest.param(Module(parameters=["weight"], position_cos=torch.randn(2, 4), tp_slope=torch.randn(4)), id="of positions"),
        pytest.param(Module(weight=torch.ones(4)), id="a norm without weights"),
        pytest.param(Module(parameters=["weight"], fused_k_scale=torch.tensor(1.0), expert_map=torch.arange(4)), id="numbers and indices"),
    ],
)
def test_what_comes_from_the_configuration_alone_is_no_obstacle(inner: nn.Module) -> None:
    assert choose(Settings(dir="", swap="auto"), runner(inner)).swap == "flip"
