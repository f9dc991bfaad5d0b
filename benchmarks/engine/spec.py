"""What `bench engine` measures, and the models it measures on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.shapes import Shape, model_config
from streamrl.errors import ConfigError

OURS, GENERATE, CONTINUOUS = "streamrl", "generate", "generate_batch"
"""The contenders: the local engine, transformers' `model.generate`, its continuous batching."""
MODELS = {
    shape.name: shape
    for shape in (
        # The model that the quickstart builds: the defaults of [model].
        Shape(name="quickstart", hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=384, vocab=104, tied=True,
              dtype="float32"),
        Shape(name="30M", hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1536, vocab=8192, tied=True,
              dtype="float32"),
    )
}  # fmt: skip
"""By name; random weights."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    models: tuple[str, ...] = ("quickstart", "30M")
    batches: tuple[int, ...] = (1, 8, 32, 64)
    """Requests that are made at once."""
    prompt_tokens: int = 12
    new_tokens: int = 48
    """Of every request: all are equally long, which is the best case of `model.generate`."""
    rounds: int = 7
    """Each runs every contender once, one after the other."""
    min_round_s: float = 0.5
    """Batches are repeated within a round until `model.generate` needs about this long for them."""
    threads: int = 1
    """CPU threads of a forward pass, of every contender."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.models:
            if name not in MODELS:
                raise ConfigError(f"expected models out of {', '.join(MODELS)}, got {name!r}")
        numbers = (*self.batches, self.prompt_tokens, self.new_tokens, self.rounds, self.threads)
        if not self.models or not self.batches or min(numbers) < 1:
            raise ConfigError(
                f"expected models, batch sizes of at least 1 and counts of at least 1, got {self}", hint="for example --batches 1,8,32,64"
            )


def build_model(name: str, seed: int, directory: Path) -> Path:
    """Write the model of that name with random weights; returns its directory."""
    # Imported here: the command line reads this file's defaults without torch.
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from streamrl.tensors.building import BUILDING

    described = model_config(MODELS[name])
    config = Qwen3Config(**{key: value for key, value in described.items() if key not in ("architectures", "model_type", "torch_dtype")})
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(directory / name)
    return directory / name
