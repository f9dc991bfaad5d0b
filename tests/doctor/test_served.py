"""Models whose versions engines would not serve as they are trained are refused by their description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.tree import Config, ModelConfig
from streamrl.doctor.run_checks import check_plan

GLM = {"model_type": "glm4_moe", "n_routed_experts": 160}
MOONLIGHT = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "topk_method": "noaux_tc"}
V2 = {"model_type": "deepseek_v2", "kv_lora_rank": 512, "topk_method": "greedy"}
NEXT = {"model_type": "qwen3_next"}
IN_PARTS = {"model_type": "kimi_vl", "text_config": {"model_type": "deepseek_v3"}}
QWEN: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 128}


@pytest.mark.parametrize(
    ("described", "swap", "state", "tensor"),
    [
        (GLM, "auto", "fail", "e_score_correction_bias"),
        (GLM, "flip", "fail", "e_score_correction_bias"),
        (GLM, "pause", "warn", "e_score_correction_bias"),
        (GLM, "local", "fail", "e_score_correction_bias"),
        (MOONLIGHT, "auto", "fail", "e_score_correction_bias"),
        (IN_PARTS, "auto", "fail", "e_score_correction_bias"),
        (V2, "auto", "fail", "w_kc"),
        (V2, "local", None, ""),
        (NEXT, "copy", "fail", "gemma_weight"),
        (QWEN, "auto", None, ""),
        (QWEN, "local", None, ""),
        ({}, "auto", None, ""),
    ],
)
def test_a_plan_with_such_a_model_is_refused(described: dict[str, Any], swap: Any, state: str | None, tensor: str, tmp_path: Path) -> None:
    if described:
        (tmp_path / "config.json").write_text(json.dumps(described))
    engine = EngineConfig(kind="local") if swap == "local" else EngineConfig(kind="sglang", sglang=SglangConfig(swap=swap))
    found = {check.name: check for check in check_plan(Config(model=ModelConfig(path=str(tmp_path)), engine=engine))}
    if state is None:
        assert "model" not in found
    else:
        assert found["model"].state == state and tensor in found["model"].found


@pytest.mark.parametrize("written", ["", "[]", "{", '{"text_config": 3}'])
def test_a_description_that_cannot_be_read_says_nothing(written: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(written)
    assert "model" not in {check.name for check in check_plan(Config(model=ModelConfig(path=str(tmp_path))))}
