"""The local engine against transformers: log-probs, batching, exactness over swaps, determinism."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from streamrl.config.tree import EngineConfig, ModelConfig
from streamrl.data.model import write_qwen3
from streamrl.engines.local.engine import LocalEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import ConfigError, EngineError
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.trainers.torch.causal_lm import CausalLM
from tests.support import models
from tests.support.errors import raises
from tests.support.models import Answer, ask, started
from tests.support.publishing import load, publish

Made = Callable[..., Any]


TOKENS = 100
"""Length of a completion into which two versions fall."""


def test_an_engine_and_a_trainer_can_be_made_at_the_same_time(tmp_path: Path):
    """While transformers loads a model it keeps all threads from tying embeddings."""
    write_qwen3(tmp_path / "policy", ModelConfig(max_len=32), seed=0)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            trainers = pool.submit(lambda: [CausalLM(tmp_path / "policy", torch.float32, torch.device("cpu")) for _ in range(4)])
            while not trainers.done():
                engine = LocalEngine(tmp_path / "policy", EngineConfig(slots=1), engine_id="e", policy="policy", max_len=8)
                assert "lm_head.weight" not in [tensor.name for tensor in engine.model.layout]
            trainers.result()


@pytest.fixture
def running(tmp_path: Path) -> Made:
    """`async with running(kind, slots=..., forward=...) as (engine, model)`: an engine that serves version 0.0 of `model`."""

    @asynccontextmanager
    async def run(kind: str, *, slots: int = 8, deterministic: bool = False, max_len: int = 256, **options: Any) -> AsyncIterator[Any]:
        path = models.save_config(kind, tmp_path)
        config = EngineConfig(slots=slots, deterministic=deterministic)
        engine = LocalEngine(path, config, engine_id="e", policy="policy", max_len=max_len, **options)
        model = models.build(kind, seed=0)
        async with started(engine, publish(models.tensors(model), Version(0, 0))):
            yield engine, model

    return run


def requests(count: int, *, longest_prompt: int = 20, temperature: float = 1.0) -> list[GenerateRequest]:
    """Mixed lengths; some with several completions; prompts of one token too."""
    rng = np.random.default_rng(count)
    return [
        GenerateRequest(
            request_id=f"r{k}",
            prompt_ids=tuple(rng.integers(3, models.VOCABULARY, 1 + k % longest_prompt).tolist()),
            seeds=tuple(range(k * 10, k * 10 + 1 + k % 3)),
            sampling=Sampling(max_new_tokens=1 + (k * 7) % 30, temperature=temperature, ignore_eos=True),
        )
        for k in range(count)
    ]


CASES = [
    *(("qwen3", "functional"), ("qwen3", "modules"), ("qwen3-untied", "functional"), ("qwen2", "functional"), ("llama", "functional")),
    *(("llama", "modules"), ("llama-full", "functional"), ("mistral", "auto"), ("gemma2", "auto"), ("qwen3-moe", "auto")),
    ("gemma3", "auto"),
]


@pytest.mark.parametrize(("kind", "forward"), CASES)
async def test_24_requests_over_8_slots_have_the_log_probs_of_a_plain_forward(running: Made, kind: str, forward: str):
    asked = requests(24, temperature=0.8)
    async with running(kind, forward=forward) as (engine, model):
        answers = await asyncio.gather(*[ask(engine, request) for request in asked])
    worst = 0.0
    for request, group in zip(asked, answers, strict=True):
        for answer in group:
            assert len(answer.ids) == request.sampling.max_new_tokens
            expected = models.teacher_forced(model, request.prompt_ids, answer.ids, temperature=0.8)
            worst = max(worst, float(np.abs(expected - answer.logprobs).max()))
    assert worst <= 1e-5


def test_the_fast_forward_is_chosen_where_it_is_known(tmp_path: Path):
    def layout(kind: str) -> list[bool]:
        path = models.save_config(kind, tmp_path / kind)
        engine = LocalEngine(path, EngineConfig(slots=1), engine_id="e", policy="policy", max_len=32)
        return [tensor.glued for tensor in engine.model.layout]

    assert any(layout("qwen3")) and any(layout("llama"))
    assert not any(layout("mistral")), "a sliding window needs the modules"


async def test_the_tokens_are_drawn_by_inverse_cdf_from_the_reported_distribution(running: Made):
    """4,096 first tokens of one prompt against the model's own distribution: exact frequencies within sampling error."""
    prompt = (5, 6, 7)
    async with running("qwen3", slots=128) as (engine, model):
        sampling = Sampling(max_new_tokens=1, ignore_eos=True)
        answers = await ask(engine, GenerateRequest(request_id="r", prompt_ids=prompt, seeds=range(4096), sampling=sampling))
    with torch.no_grad():
        p = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
    counts = np.bincount([answer.ids[0] for answer in answers], minlength=len(p))
    big = p * 4096 > 5
    chi_square = ((counts - 4096 * p)[big] ** 2 / (4096 * p)[big]).sum()
    degrees = int(big.sum()) - 1
    assert degrees > 10
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize(("kind", "forward"), [("qwen3", "functional"), ("qwen3", "modules"), ("mistral", "auto")])
async def test_versions_are_exact_over_swaps_inside_running_requests(running: Made, kind: str, forward: str):
    """A replay that switches models where the versions say gives the same log-probs; one token off and it does not."""
    built = {Version(0, number): models.build(kind, seed=number) for number in range(3)}
    published = {version: publish(models.tensors(model), version) for version, model in built.items()}
    sampling = Sampling(max_new_tokens=TOKENS, ignore_eos=True)
    asked = [
        GenerateRequest(request_id=f"r{k}", prompt_ids=tuple(range(3, 5 + 4 * k)), seeds=(k,), sampling=sampling, stream=True)
        for k in range(4)
    ]
    answers = [Answer() for _ in asked]
    async with running(kind, forward=forward) as (engine, _):

        async def follow(index: int) -> None:
            async for chunk in engine.generate(asked[index]):
                answers[index].add(chunk)
                if index == 0 and answers[0].chunks in (20, 50):
                    await load(engine, published[Version(0, 1 if answers[0].chunks == 20 else 2)])

        await asyncio.gather(*[follow(index) for index in range(len(asked))])
    assert len(set(answers[0].versions)) == 3, "both swaps fell into the running request"
    for request, answer in zip(asked, answers, strict=True):
        exact = models.replay(built, request.prompt_ids, answer.ids, answer.versions)
        assert np.abs(np.array(exact) - answer.logprobs).max() <= 1e-4
    for shift in (1, -1):
        moved = answers[0].versions[:1] * shift + answers[0].versions[: TOKENS - shift]
        if shift < 0:
            moved = answers[0].versions[1:] + answers[0].versions[-1:]
        control = models.replay(built, asked[0].prompt_ids, answers[0].ids, moved)
        assert np.abs(np.array(control) - answers[0].logprobs).max() > 1e-2


async def test_deterministic_mode_gives_the_same_bits_alone_and_among_others(running: Made):
    request = GenerateRequest(
        request_id="one", prompt_ids=(9, 8, 7, 6, 5), seeds=(3, 4), sampling=Sampling(max_new_tokens=40, ignore_eos=True, top_p=0.9)
    )
    async with running("qwen3", deterministic=True, slots=7) as (engine, _):
        alone = await ask(engine, request)
        crowd = [asyncio.ensure_future(ask(engine, other)) for other in requests(20)]
        await asyncio.sleep(0)
        crowded = await ask(engine, request)
        await asyncio.gather(*crowd)
    async with running("qwen3", deterministic=True, slots=3) as (engine, _):
        elsewhere = await ask(engine, request)
    for one, other, third in zip(alone, crowded, elsewhere, strict=True):
        assert one.ids == other.ids == third.ids
        assert one.logprobs == other.logprobs == third.logprobs


async def test_weights_that_are_not_finite_fail_their_requests_and_not_the_engine(running: Made):
    async with running("qwen3") as (engine, model):
        good = models.tensors(model)
        bad = {name: np.full_like(tensor, np.nan) for name, tensor in good.items()}
        await load(engine, publish(bad, Version(0, 1)))
        request = GenerateRequest(request_id="r", prompt_ids=(5, 6), seeds=(1, 2))
        with raises(EngineError, version=ANY, request=ANY):
            await ask(engine, request)
        await load(engine, publish(good, Version(0, 2)))
        assert (await ask(engine, request))[0].ids
        assert (await engine.info()).running == 0


def test_what_is_no_model_for_this_engine_is_refused(tmp_path: Path):
    for error, values, kind in ((ConfigError, {"path": str(tmp_path)}, None), (EngineError, {"layers": ["linear_attention"]}, "mamba")):
        if kind:
            models.save_config(kind, tmp_path)
        with raises(error, **values):
            LocalEngine(tmp_path, EngineConfig(slots=1), engine_id="e", policy="policy", max_len=32)


def test_a_router_bias_that_no_version_carries_is_refused(tmp_path: Path):
    """It would be 0 here, and what was trained with it sampled without."""
    path = models.save_config("glm4-moe", tmp_path)
    with raises(ConfigError, key="model.path", tensor="model.layers.1.mlp.gate.e_score_correction_bias"):
        LocalEngine(path, EngineConfig(slots=1), engine_id="e", policy="policy", max_len=32)


async def test_a_prompt_longer_than_one_prefill_pass_is_taken(running: Made, monkeypatch: pytest.MonkeyPatch):
    """More joiners than one pass holds are prefilled in several."""
    monkeypatch.setattr("streamrl.engines.local.model.PREFILL_TOKENS", 200)
    rng = np.random.default_rng(0)
    sampling = Sampling(max_new_tokens=2, ignore_eos=True)
    asked = [
        GenerateRequest(request_id=f"r{k}", prompt_ids=tuple(rng.integers(3, 64, 150 + 20 * k).tolist()), seeds=(k,), sampling=sampling)
        for k in range(5)
    ]
    async with running("qwen3") as (engine, model):
        answers = await asyncio.gather(*[ask(engine, request) for request in asked])
    for request, (answer,) in zip(asked, answers, strict=True):
        expected = models.teacher_forced(model, request.prompt_ids, answer.ids)
        assert np.abs(expected - answer.logprobs).max() <= 2e-5


@pytest.mark.parametrize("deterministic", [False, True])
async def test_where_tokens_went_is_what_a_plain_forward_says(running: Made, deterministic: bool):
    """Of prompts that share a prefill, of rows that move, of completions that are cut; the last token is computed by nobody."""
    asked = requests(16, temperature=0.8)
    async with running("qwen3-moe", routed=True, deterministic=deterministic) as (engine, model):
        answers = await asyncio.gather(*[ask(engine, request) for request in asked])
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, given, output: chosen.append(output[2]))
    for request, group in zip(asked, answers, strict=True):
        for answer in group:
            chosen.clear()
            with torch.no_grad():
                model(input_ids=torch.tensor([[*request.prompt_ids, *answer.ids]]))
            expected = torch.stack(chosen, 1)[:-1].sort(-1).values.numpy()
            found = answer.extras["routed_experts"].array()
            assert found.dtype == np.uint8 and (np.sort(found) == expected).all()


async def test_only_a_mixture_says_where_tokens_went(running: Made):
    async with running("qwen3-moe") as (engine, _):
        [answer] = await ask(engine, requests(1)[0])
        assert "routed_experts" not in answer.extras
    with raises(ConfigError, key="trainer.routing_replay"):
        async with running("qwen3", routed=True):
            pass
