"""SGLang on a GPU says what it drew from: by FlashInfer's sampler, whose ties and sums are not those of the mask that goes with it.

SGLANG_PYTHON=.../bin/python python -m pytest -m gpu tests/sglang/test_candidates_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.recording import Recording
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.sglang.engine import SglangEngine
from streamrl.engines.sglang.server import SglangServer
from streamrl.schemas.candidates import candidates_problem
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.sglang.cpu import FLAGS as CPU_FLAGS
from tests.support import models
from tests.support.models import Answer, ask
from tests.support.publishing import load, publish

pytestmark = [pytest.mark.gpu, pytest.mark.process]

VOCAB, PROMPT, EDGE = 512, (5, 9, 11, 7), 5e-3
"""EDGE: what other kernels may move a probability by at the edge of a support."""
FLAGS = {name: value for name, value in CPU_FLAGS.items() if name != "device"} | {"sampling_backend": "flashinfer"}


def model_in(directory: Path) -> transformers.PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.Qwen3Config(**shape, head_dim=64, intermediate_size=256, eos_token_id=2, bos_token_id=None)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(directory)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.copy_(parameter.half())  # what SGLang serves: its kernels on GPUs have no float32
    return model


async def answers(
    tmp_path: Path, python: str, sampling: Sampling, recording: Recording
) -> tuple[transformers.PreTrainedModel, list[Answer]]:
    model = model_in(tmp_path)
    config = EngineConfig(kind="sglang", slots=8, sglang=SglangConfig(python=python, gpus=(0,), flags=FLAGS))
    server = SglangServer(config, tmp_path, name="gpu", max_len=512, dtype="float16")
    engine = SglangEngine(config, tmp_path, server, engine_id="gpu", policy="policy", max_len=512, recording=recording)
    await engine.start()
    try:
        served: dict[str, Any] = {name: tensor.astype(np.float16) for name, tensor in models.tensors(model).items()}
        await load(engine, publish(served, Version(0, 0)))
        request = GenerateRequest(request_id="r", prompt_ids=PROMPT, seeds=tuple(range(8)), sampling=sampling, stream=True)
        return model, await ask(engine, request)
    finally:
        await engine.stop()


def probabilities(model: transformers.PreTrainedModel, answer: Answer, temperature: float) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*PROMPT, *answer.ids]]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return (logits.double() / temperature).softmax(-1).numpy()


async def test_masks_are_the_nucleus_and_hold_what_was_drawn(tmp_path: Path, sglang_python: str) -> None:
    sampling = Sampling(max_new_tokens=100, ignore_eos=True, temperature=0.8, top_p=0.8, top_k=64)
    model, found = await answers(tmp_path, sglang_python, sampling, Recording(support=True))
    for answer in found:
        sets, probs = answer.extras["candidates"].sets(), probabilities(model, answer, 0.8)
        drawn = np.array(answer.ids, np.int32), np.array(answer.logprobs, np.float32), np.ones(100, np.bool_)
        assert candidates_problem(sets, *drawn, vocab_size=VOCAB, likely=False) == ""
        for place, (first, end) in enumerate(zip(sets.bounds, sets.bounds[1:], strict=False)):
            kept = probs[place, sets.ids[first:end]]
            assert len(kept) <= 65
            assert kept.sum() > 0.8 - EDGE or len(kept) >= 64, "all that top-p keeps"
            assert kept.sum() - np.sort(kept)[:2].sum() < 0.8 + EDGE, "and no more, but for a drawn one at the edge"
            assert np.log(probs[place, answer.ids[place]] / kept.sum()) == pytest.approx(answer.logprobs[place], abs=0.02)


async def test_the_likeliest_are_the_models(tmp_path: Path, sglang_python: str) -> None:
    sampling = Sampling(max_new_tokens=100, ignore_eos=True, temperature=0.8)
    model, found = await answers(tmp_path, sglang_python, sampling, Recording(top=20))
    for answer in found:
        sets, probs = answer.extras["candidates"].sets(), probabilities(model, answer, 0.8)
        drawn = np.array(answer.ids, np.int32), np.array(answer.logprobs, np.float32), np.zeros(100, np.bool_)
        assert candidates_problem(sets, *drawn, vocab_size=VOCAB, likely=True) == ""
        assert set(sets.counts.tolist()) <= {20, 21}
        rows = np.repeat(np.arange(100), sets.counts)
        assert sets.logprobs is not None
        assert np.abs(np.exp(sets.logprobs) - probs[rows, sets.ids]).max() < EDGE
