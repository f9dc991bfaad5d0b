"""Tiny models of several architectures, and what transformers itself says about a sequence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from streamrl.engines.protocol import Chunk, Engine, GenerateRequest, HostedEngine
from streamrl.schemas.versions import Version
from streamrl.tensors.names import named
from tests.support.publishing import Published, load

Hosted = TypeVar("Hosted", bound=HostedEngine)

VOCABULARY = 64
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def config(kind: str) -> PretrainedConfig:
    """A tiny configuration; `llama-full` has no grouped heads, `mistral` a window of 6, `gemma2` a window and capped scores.

    `gemma3` has windows of 8 in two of its three layers, whose rotations differ from those of the third.
    """
    if kind == "qwen3":
        return transformers.Qwen3Config(**_SHAPE, tie_word_embeddings=True)
    if kind == "qwen3-untied":
        return transformers.Qwen3Config(**_SHAPE, tie_word_embeddings=False)
    if kind == "qwen2":
        return transformers.Qwen2Config(**{k: v for k, v in _SHAPE.items() if k != "head_dim"}, tie_word_embeddings=True)
    if kind == "llama":
        return transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=False)
    if kind == "llama-full":
        full: dict[str, Any] = {**_SHAPE, "num_key_value_heads": 4}
        return transformers.LlamaConfig(**full, tie_word_embeddings=True)
    if kind == "mistral":
        return transformers.MistralConfig(**_SHAPE, sliding_window=6, tie_word_embeddings=False)
    if kind == "gemma2":
        return transformers.Gemma2Config(**_SHAPE, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=2.0)
    if kind == "gemma3":
        three = {**_SHAPE, "num_hidden_layers": 3, "num_key_value_heads": 1}
        kinds = ["sliding_attention", "sliding_attention", "full_attention"]
        return transformers.Gemma3TextConfig(**three, sliding_window=8, query_pre_attn_scalar=8, layer_types=kinds)
    if kind == "qwen3-moe":
        return transformers.Qwen3MoeConfig(**_SHAPE, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
    if kind == "glm4-moe":
        routed: dict[str, Any] = {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        }
        return transformers.Glm4MoeConfig(**_SHAPE, moe_intermediate_size=24, **routed)
    if kind == "mamba":
        return transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    raise ValueError(kind)


def build(kind: str, seed: int) -> PreTrainedModel:
    """Random weights, with a spread that makes attention and distributions far from uniform."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def save_config(kind: str, path: Path) -> Path:
    config(kind).save_pretrained(path)
    return path


def tensors(model: PreTrainedModel) -> dict[str, npt.NDArray[np.float32]]:
    found: dict[str, npt.NDArray[np.float32]] = {}
    for name, parameter in model.named_parameters():
        for one in named(model.config.model_type, name, tuple(parameter.shape)):
            found[one.name] = parameter.detach().reshape(-1)[one.first : one.first + one.numel].view(one.shape).numpy()
    return found


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> npt.NDArray[np.float32]:
    """Log-probs of `ids` after `prompt` by one full forward pass."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
    return logp[torch.arange(len(ids)), torch.tensor(ids)].numpy()


@torch.no_grad()
def replay(models: dict[Version, PreTrainedModel], prompt: Sequence[int], ids: Sequence[int], versions: Sequence[Version]) -> list[float]:
    """Log-probs token by token over a growing cache, each pass under the version that sampled its token."""
    cache = DynamicCache()
    result: list[float] = []
    fed = list(prompt)
    for token, version in zip(ids, versions, strict=True):
        logits = models[version](input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[0, -1]
        result.append(float(torch.log_softmax(logits, -1)[token]))
        fed = [token]
    return result


@asynccontextmanager
async def started(engine: Hosted, published: Published | None = None) -> AsyncIterator[Hosted]:
    """Run the engine, which serves a version where one is given, until the test is done with it."""
    await engine.start()
    try:
        if published is not None:
            await load(engine, published)
        yield engine
    finally:
        await engine.stop()


class Answer:
    """A completion put together from its chunks."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[Version] = []
        self.reason: str | None = None
        self.chunks = 0
        self.extras: dict[str, Any] = {}

    def add(self, chunk: Chunk) -> None:
        assert self.reason is None, "a chunk after the last one"
        assert len(chunk.token_ids) == len(chunk.logprobs) == sum(span.length for span in chunk.spans)
        self.ids += chunk.token_ids
        self.extras = chunk.extras
        self.logprobs += chunk.logprobs
        for span in chunk.spans:
            assert span.version is not None and span.length > 0
            self.versions += [span.version] * span.length
        self.reason = chunk.finish_reason
        self.chunks += 1


async def ask(engine: Engine, request: GenerateRequest) -> list[Answer]:
    answers = [Answer() for _ in request.seeds]
    async for chunk in engine.generate(request):
        answers[chunk.completion].add(chunk)
    assert all(answer.reason is not None for answer in answers)
    return answers
