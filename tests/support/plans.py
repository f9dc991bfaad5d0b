"""A configuration on machines that are not there: what the doctor says of it, its paths and devices left out."""

import json
from pathlib import Path
from typing import Any

from streamrl.config.tree import Config
from streamrl.doctor.backend import check_backend
from streamrl.doctor.findings import Check
from streamrl.doctor.gpu_memory import check_gpu_memory
from streamrl.doctor.rewards import check_rewards
from streamrl.doctor.run_checks import check_plan
from streamrl.trainers.activations import GIB

_QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
_70B = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3 | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "Qwen3-1.7B": _QWEN3 | {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "Qwen3-4B": _QWEN3 | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
    "Llama-3.3-70B-Instruct": _70B | {"model_type": "llama", "intermediate_size": 28_672, "vocab_size": 128_256},
    "Qwen2.5-72B-Instruct": _70B | {"model_type": "qwen2", "intermediate_size": 29_568, "vocab_size": 152_064},
}
"""Sizes, as the config.json of each says them."""
GPUS = {"H100": 79.2, "H200": 139.8, "B300": 268.0}
"""GiB that torch sees of one: 80, 141 and 288 GB. Of a B300 it is by arithmetic."""


def write_model(place: Path, name: str) -> Path:
    (place / name).mkdir(parents=True, exist_ok=True)
    (place / name / "config.json").write_text(json.dumps(MODELS[name]))
    return place / name


def plan(config: Config, gpu: str) -> dict[str, Check]:
    """Return by name the checks that `streamrl doctor` would make of it on a machine with such GPUs."""
    found = [check_backend(config), *check_plan(config)]
    found += [*check_gpu_memory(config, int(GPUS[gpu] * GIB)), *check_rewards(config)]
    return {check.name: check for check in found if check is not None}


def reckoned(checks: dict[str, Check]) -> float:
    """GiB that a rank of the trainer takes at least."""
    return float(checks["trainer memory"].found.split(" GiB at least")[0].rpartition(" ")[2])
