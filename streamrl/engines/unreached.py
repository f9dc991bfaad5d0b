"""Weights that engines hold or compute outside of what a version carries, by a model's `config.json`; no torch.

A server that runs looks at its own model (`streamrl.engines.live_swap.model.left_out`). This is for what is asked before one does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

_BIASED = (
    *("deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_k2", "kimi_k25", "kimi_linear", "glm4_moe", "glm4_moe_lite", "glm4v_moe"),
    *("glm_moe_dsa", "dots1", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "longcat_flash", "mimo_v2_flash", "minimax_m2"),
    *("nemotron_h", "solar_open", "hy_v3", "bailing_moe", "bailing_moe_v2", "bailing_hybrid", "step3p5"),
)
ROUTER_BIASES: Mapping[str, str] = {
    **dict.fromkeys(_BIASED, "e_score_correction_bias"),
    **dict.fromkeys(("afmoe", "lfm2_moe"), "expert_bias"),
}
"""The bias that a mixture's routers choose by, which is not trained, by `model_type`."""
_PLUS_ONE = ("gemma2", "qwen3_next", "qwen3_5", "qwen3_5_moe", "step3p5", "minimax_m3")
"""Norms whose weight SGLang keeps a second time, plus 1."""


def read_description(model_dir: str) -> Mapping[str, Any]:
    """Read what the `config.json` of a model directory says of the language model; empty where it is not here or cannot be read."""
    try:
        found: Any = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8")) if model_dir else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    described = cast("dict[str, Any]", found)
    text: Any = described.get("text_config")
    return {**described, **cast("dict[str, Any]", text)} if isinstance(text, dict) else described


def router_bias(described: Mapping[str, Any]) -> str:
    """The name of a router's bias that no version carries; empty where the model has none."""
    if described.get("topk_method") == "noaux_tc" or described.get("moe_router_enable_expert_bias"):
        return "e_score_correction_bias"
    return ROUTER_BIASES.get(str(described.get("model_type")), "")


def unreached(described: Mapping[str, Any]) -> str:
    """The first of SGLang's tensors that a version would not reach, of a model described so; empty where there is none."""
    if bias := router_bias(described):
        return bias
    if described.get("kv_lora_rank"):  # multi-head latent attention
        return "w_kc"
    return "gemma_weight" if described.get("model_type") in _PLUS_ONE else ""
