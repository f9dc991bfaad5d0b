"""Three ways to generate the same number of tokens from the same prompts at temperature 1 on this machine's CPU."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks.engine.spec import CONTINUOUS, GENERATE, OURS
from streamrl.config.tree import EngineConfig
from streamrl.engines.local.engine import LocalEngine
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.tensors.building import BUILDING
from streamrl.weights.manifest import Content, build
from streamrl.weights.protocol import Part, Shard

Prompts = Sequence[Sequence[int]]


class Made(msgspec.Struct, frozen=True):
    """What a contender made of some prompts."""

    tokens: list[list[int]]
    """New tokens of every prompt."""
    logprobs: list[list[float]] | None = None
    """Their log-probs, where the contender returns them."""


class Contender(Protocol):
    """One way to generate."""

    name: str

    async def start(self) -> None: ...

    async def generate(self, prompts: Prompts, new_tokens: int) -> Made: ...

    async def stop(self) -> None: ...


class LocalContender:
    """The local engine as a producer in its process sees it: one request a prompt, all at once, log-probs and versions returned."""

    name = OURS

    def __init__(self, model_dir: Path, model: PreTrainedModel, *, slots: int, max_len: int, threads: int) -> None:
        config = EngineConfig(kind="local", slots=slots, threads=threads)
        self._engine = LocalEngine(model_dir, config, engine_id="bench", policy="policy", max_len=max_len, device="cpu")
        self._model = model
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Start it and have it serve the model's weights as version 0."""
        await self._engine.start()
        content = Content(_shards(self._model))
        data = np.empty(content.nbytes, np.uint8)
        content.fill(0, data)

        async def whole() -> AsyncIterator[Part]:
            yield Part(0, data.data)

        version = Version(0, 0)
        manifest = build(content, run="bench", policy="policy", version=version, parts=(), transport="shm")
        await self._engine.stage(manifest, whole())
        await self._engine.commit(version)

    async def generate(self, prompts: Prompts, new_tokens: int) -> Made:
        """All prompts at once."""
        sampling = Sampling(temperature=1.0, max_new_tokens=new_tokens, ignore_eos=True)
        chunks = await asyncio.gather(*(self._one(prompt, sampling) for prompt in prompts))
        return Made([list(chunk.token_ids) for chunk in chunks], [list(chunk.logprobs) for chunk in chunks])

    async def stop(self) -> None:
        """End its thread."""
        await self._engine.stop()

    async def _one(self, prompt: Sequence[int], sampling: Sampling) -> Chunk:
        number = next(self._numbers)
        request = GenerateRequest(request_id=str(number), prompt_ids=prompt, sampling=sampling, seeds=(number,))
        (chunk,) = [chunk async for chunk in self._engine.generate(request)]
        return chunk


class GenerateContender:
    """transformers' `model.generate` on one rectangular batch, with its defaults but for sampling."""

    name = GENERATE

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model

    async def start(self) -> None:
        """Nothing to start."""

    async def generate(self, prompts: Prompts, new_tokens: int) -> Made:
        """All prompts as one batch; no end token, so that no sequence ends early and none is looked for."""
        ids = torch.tensor(prompts)
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=_sampling(new_tokens))
        return Made(out[:, ids.shape[1] :].tolist())

    async def stop(self) -> None:
        """Nothing to stop."""


class ContinuousContender:
    """transformers' continuous batching: `generate_batch`, its manager kept from call to call."""

    name = CONTINUOUS

    def __init__(self, model: PreTrainedModel, *, most: Prompts, new_tokens: int) -> None:
        self._model: Any = model
        self._most = most
        self._new_tokens = new_tokens
        # Room for the largest batch and no more: without these the cache takes most of the machine's memory.
        page = len(most[0]) + new_tokens
        self._config = ContinuousBatchingConfig(page_size=page, num_blocks=2 * len(most) + 2, max_batch_tokens=max(256, len(most) * page))

    async def start(self) -> None:
        """The manager is made for the workload it sees first: the largest."""
        await self.generate(self._most, self._new_tokens)

    async def generate(self, prompts: Prompts, new_tokens: int) -> Made:
        """All prompts as requests of one call. Results come in no promised order; only their number matters here."""
        inputs = [list(prompt) for prompt in prompts]
        results = self._model.generate_batch(
            inputs, generation_config=_sampling(new_tokens, end_id=-1), continuous_batching_config=self._config, persistent_manager=True
        )
        errors = [result.error for result in results.values() if result.error]
        if errors or len(results) != len(inputs):
            raise RuntimeError(f"{len(results)} of {len(inputs)} requests ended, first error: {errors[0] if errors else 'none'}")
        return Made([list(result.generated_tokens) for result in results.values()])

    async def stop(self) -> None:
        """End its thread."""
        self._model.destroy_cached_continuous_batching_manager()


def load(model_dir: Path) -> PreTrainedModel:
    """The model for a peer, in float32 on the CPU."""
    with BUILDING:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    # `generate` fills what its configuration leaves open from this one.
    model.generation_config = GenerationConfig()
    return model.eval()


def teacher_forced(model: PreTrainedModel, prompts: Prompts, made: Made) -> float:
    """Largest difference of the log-probs to those of the model itself in one pass over the sequences."""
    assert made.logprobs is not None
    tokens = torch.tensor([[*prompt, *new] for prompt, new in zip(prompts, made.tokens, strict=True)])
    first = len(prompts[0])
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits[:, first - 1 : -1]
    expected = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, first:, None])[..., 0]
    return float((expected - torch.tensor(made.logprobs)).abs().max())


async def started(contenders: Sequence[Contender], failed: dict[str, str]) -> list[Contender]:
    """Start contenders; a peer that cannot run here is left out, with the reason in `failed`."""
    running: list[Contender] = []
    for contender in contenders:
        try:
            await contender.start()
        except Exception as error:  # whatever another library raises is the answer to whether it runs here
            if contender.name == OURS:
                raise
            logging.getLogger(__name__).warning("event=left_out contender=%s", contender.name, exc_info=error)
            failed[contender.name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        running.append(contender)
    return running


def _sampling(new_tokens: int, *, end_id: int | None = None) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens, eos_token_id=end_id, pad_token_id=0
    )


def _shards(model: PreTrainedModel) -> list[Shard]:
    arrays = {name: parameter.detach().contiguous().numpy() for name, parameter in model.named_parameters()}
    return [
        Shard(name=name, dtype=str(array.dtype), global_shape=array.shape, data=array.reshape(-1).view(np.uint8), shape=array.shape)
        for name, array in arrays.items()
    ]
