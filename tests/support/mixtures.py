"""A mixture of experts that a run samples from and trains."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamrl.data.characters import VOCAB_SIZE, write_tokenizer


def write_mixture(directory: Path) -> None:
    """A Qwen3-MoE of one layer for the tokenizer of characters."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCAB_SIZE, **sizes, **experts, max_position_embeddings=64))
    model.save_pretrained(directory)
    write_tokenizer(directory)
