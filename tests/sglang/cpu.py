"""How the tests run SGLang on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamrl.config.engines import EngineConfig, SglangConfig
from tests.support import models

ROOT = Path(__file__).resolve().parents[2]
MAX_LEN = 1024
SLOTS = 8
FLAGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "mem_fraction_static": 0.2,
    "max_total_tokens": 16384,
}


def cpu_config(python: str, *, slots: int = SLOTS, flags: dict[str, Any] | None = None, **sglang: Any) -> EngineConfig:
    """An engine section for SGLang on a CPU; `flags` add to the ones that a CPU needs."""
    env = {"OMP_NUM_THREADS": "1"}
    section = SglangConfig(python=python, env=env, flags=FLAGS | (flags or {}), start_timeout_s=240.0, **sglang)
    return EngineConfig(kind="sglang", slots=slots, sglang=section)


def write_model(kind: str, directory: Path) -> Path:
    """A tiny model's configuration, without weights."""
    config = models.config(kind)
    config.architectures = [{"qwen3": "Qwen3ForCausalLM", "qwen3-untied": "Qwen3ForCausalLM"}[kind]]
    config.save_pretrained(directory)
    return directory
