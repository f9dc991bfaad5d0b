"""A trainer of bfloat16 parameters and a local engine of the same type: one digest from ledger to served weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamrl.bus.memory import MemoryBus
from streamrl.config.registry import Role
from streamrl.config.tree import Config, EngineConfig, ModelConfig, TrainerConfig
from streamrl.core.batches import TrainBatch
from streamrl.engines.factory import make_engine
from streamrl.engines.protocol import GenerateRequest
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.weights.bus import BusTransport
from tests.support.models import started
from tests.support.scoring import score
from tests.support.wanted import slices

VOCAB = 64


def save_model(path: Path) -> Path:
    """Float32 weights and configuration: both sides are told another type."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **sizes, intermediate_size=64, tie_word_embeddings=True, eos_token_id=1))
    model.save_pretrained(path)
    return path


def batch(prompt: list[int], answer: list[int], logprobs: list[float]) -> TrainBatch:
    return TrainBatch.from_lists([prompt], [answer], rewards=[1.0], sampler_logprobs=[logprobs])


async def test_bfloat16_from_the_trainer_to_the_engine(memory_bus: MemoryBus, tmp_path: Path) -> None:
    model_dir = save_model(tmp_path)
    config = Config(model=ModelConfig(dtype="float32"), trainer=TrainerConfig(dtype="bfloat16", device="cpu"))
    trainer = make_trainer(config, model_dir)
    digest = trainer.step(batch([2, 3, 4], [5, 6], [-4.0, -4.0])).digest
    transport = BusTransport(memory_bus.blobs, run="r", policy="policy")
    manifest = await transport.publish(Version(0, 1), trainer.shards())
    assert manifest.digest == digest
    assert {spec.dtype for spec in manifest.tensors} == {"bfloat16"}
    engine = make_engine(EngineConfig(slots=2), model_dir, engine_id="e", dtype="bfloat16")
    async with started(engine):
        assert await engine.stage(manifest, transport.fetch(manifest, slices(manifest))) == digest
        assert (await engine.commit(manifest.version)).committed
        sampling = Sampling(max_new_tokens=12, ignore_eos=True)
        request = GenerateRequest(request_id="q", prompt_ids=(2, 3, 4), sampling=sampling, seeds=(7,))
        ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in engine.generate(request):
            ids += chunk.token_ids
            logprobs += chunk.logprobs
    scores = score(trainer, batch([2, 3, 4], ids, logprobs), Role.POLICY)[3:]
    assert len(ids) == 12
    # Two implementations in a type of 8 bits of mantissa.
    assert np.abs(scores - np.array(logprobs)).max() < 0.1
