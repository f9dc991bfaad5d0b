"""Small models of each architecture that is converted."""

from pathlib import Path
from typing import Any

import torch
import transformers

KINDS = ("Qwen3", "Llama", "Qwen2", "Qwen3Moe")


def write_model(directory: Path, kind: str, *, tied: bool, layers: int = 4, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> None:
    """Write a model directory with random weights, norms and biases included, and a file that stands for the tokenizer."""
    counts = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    widths = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    options: dict[str, Any] = {**widths, **counts, **sizes}
    if kind != "Qwen2":
        options["head_dim"] = 8
    if kind == "Qwen3Moe":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
    config = getattr(transformers, f"{kind}Config")(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.data = torch.randn_like(parameter) * 0.3 + ("norm" in name)
    model.to(dtype).save_pretrained(directory)
    (directory / "tokenizer.txt").write_text("its tokenizer")
