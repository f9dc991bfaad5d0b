"""The `local` engine: transformers models with continuous batching, on a CPU or one GPU, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from streamrl.config.recording import NOTHING, Recording
from streamrl.config.tree import EngineConfig
from streamrl.engines.batching.engine import BatchingEngine
from streamrl.engines.local.model import LocalModel


class LocalEngine(BatchingEngine):
    """Engine and weight host over a Hugging Face causal LM. Serves nothing until the first commit: requests wait.

    Args:
        model_dir: holds `config.json`; weights in it are not read.
        config: `slots`, `threads` and `deterministic` are used.
        engine_id: names this engine.
        policy: name of the policy it serves.
        max_len: longest sequence in tokens, prompt included.
        forward: see `LocalModel`.
        device: a torch device; empty: the first GPU, or the CPU where there is none.
        dtype: type of the weights, as they are published; empty: the one in `config.json`.
        routed: completions say where their tokens went.
        recording: what else they say beside their tokens.

    Raises:
        ConfigError: no usable configuration in `model_dir`.
        EngineError: an architecture that cannot be decoded here.
    """

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        *,
        engine_id: str,
        policy: str,
        max_len: int,
        forward: Literal["auto", "functional", "modules"] = "auto",
        device: str = "",
        dtype: str = "",
        routed: bool = False,
        recording: Recording = NOTHING,
    ) -> None:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model = LocalModel(
            model_dir,
            slots=config.slots,
            max_len=max_len,
            threads=config.threads,
            deterministic=config.deterministic,
            forward=forward,
            device=place,
            dtype=getattr(torch, dtype) if dtype else None,
            routed=routed,
            recording=recording,
        )
        super().__init__(model, slots=config.slots, engine_id=engine_id, policy=policy, model_dir=model_dir, grammars=True)
        self.gpus = int(place.type == "cuda")
