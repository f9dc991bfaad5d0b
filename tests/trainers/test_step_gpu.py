"""The step on a GPU: packed attention and the compiled head against float64, one compilation, equal bits, activations that fit.

`scripts/gpu/step.sh` runs them and shows what was measured.
"""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from streamrl.algorithms.chunked_head import chunk_kernels, chunked_logprobs
from streamrl.algorithms.logprobs import LinearHead
from streamrl.core.batches import TrainBatch
from streamrl.trainers.torch.attention import packed_attention
from tests.support import trainers
from tests.support.gpus import LONG, SMALL, answered
from tests.support.measured import Measured, fresh_digests, say
from tests.support.steps import LEARNED, check_alike
from tests.support.trainers import DIRECT, Models

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(400)]
make = partial(trainers.make, loss=DIRECT, rate=1e-4, dtype="bfloat16", device="cuda")


def answers_of(count: int, mean: int, cap: int, *, seed: int, vocab: int) -> TrainBatch:
    """Groups of 8 with prompts of 300 and log-normal answers."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(mean) - 0.32, 0.8, count).clip(8, cap).astype(int)
    answers = [rng.integers(2, vocab, int(n)).tolist() for n in lengths]
    return answered(rng.integers(2, vocab, 300).tolist(), answers, group=8, mu=-float(np.log(vocab)), step=seed)


@pytest.mark.parametrize(("width", "window"), [(64, None), (256, 64)])
def test_packed_attention_is_that_of_each_sample_in_float64(width: int, window: int | None) -> None:
    """Heads of Qwen3, and of Gemma 3 with its windows."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, 1024, width, device="cuda", generator=generator).bfloat16().requires_grad_()

    query, key, value = normal(8), normal(2), normal(2)
    bounds = [0, 1, 130, 700, 1000, 1024, 1024, 1024]
    starts = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    how = {"scaling": 0.1, "cu_seq_lens_q": starts, "max_length_q": 1024, "sliding_window": window}
    out, _ = packed_attention(torch.nn.Module(), query, key, value, None, **how)
    slopes = torch.randn(out.shape, device="cuda", generator=generator).bfloat16()
    out.backward(slopes)
    wide = [x.detach().double().requires_grad_() for x in (query, key, value)]
    parts: list[torch.Tensor] = []
    for first, end in itertools.pairwise(bounds):
        q, k, v = (x[0, :, first:end] for x in wide)
        k, v = k.repeat_interleave(4, 0), v.repeat_interleave(4, 0)
        mask = torch.ones(end - first, end - first, dtype=torch.bool, device="cuda").tril().triu(1 - (window or 1024))
        parts.append(((q @ k.transpose(1, 2) * 0.1).masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    expected = torch.cat(parts)[None]
    expected.backward(slopes.double())
    say(f"packed attention: greatest error {(out.double() - expected).abs().max():.1e}")
    assert torch.allclose(out.double(), expected, atol=2e-2, rtol=2e-2)
    for ours, theirs in zip((query, key, value), wide, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad.double() - theirs.grad).norm() < 2e-2 * theirs.grad.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_head_by_chunks_is_that_of_float64(compiled: bool) -> None:
    vocab, tokens = 151_936, 5000
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, 1024, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (0.05 * torch.randn(vocab, 1024, device="cuda", generator=generator)).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    temperature = torch.full((tokens,), 0.8, device="cuda")
    kernels = chunk_kernels(vocab, compiled=compiled)
    slopes = torch.randn(tokens, device="cuda", generator=generator)
    for _ in range(2):  # the first compiles
        hidden.grad = weight.grad = None
        with Measured() as took:
            logprobs, entropy = chunked_logprobs(hidden, targets, LinearHead(weight), temperature_M=temperature, kernels=kernels)
            (logprobs @ slopes).backward()
    assert hidden.grad is not None and weight.grad is not None
    sample = slice(0, 5000, 50)
    z = hidden.detach()[sample].double() @ weight.detach().double().T / 0.8
    q = z.log_softmax(-1)
    expected = q.gather(-1, targets[sample, None])[:, 0]
    of_hidden = ((torch.nn.functional.one_hot(targets[sample], vocab) - q.exp()) * slopes[sample, None] / 0.8) @ weight.detach().double()
    error = float((logprobs.detach()[sample] - expected).abs().max())
    relative = float((hidden.grad[sample].double() - of_hidden).norm() / of_hidden.norm())
    errors = f"errors {error:.1e} of log-probs, {relative:.1e} of gradients"
    say(f"head by chunks, compiled={compiled}: {took.ms:.0f} ms, {took.more:.1f} GiB, {errors}")
    assert error < 1e-3 and relative < 1e-2
    assert (entropy.detach()[sample] + (q.exp() * q).sum(-1)).abs().max() < 1e-3


@pytest.mark.parametrize("compile_", ["off", "on"])
def test_fresh_processes_with_empty_and_with_warm_caches_give_the_same_digest(make_model: Models, tmp_path: Path, compile_: str) -> None:
    directory = make_model("bfloat16", **LONG)
    assert len(set(fresh_digests(directory, compile_, ("one", "two", "two"), tmp_path))) == 1


def test_a_run_is_compiled_once(make_model: Models) -> None:
    directory = make_model("bfloat16", **SMALL, max_position_embeddings=4096)
    torch.compiler.reset()
    trainer = make(directory, micro_tokens=4096)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for seed, mean in enumerate((200, 800, 1500)):
        result = trainer.step(answers_of(32, mean, 3000, seed=seed, vocab=1000))
        assert result.choices is not None and result.choices.compiled and result.choices.attention == "packed"
        assert counters["stats"]["unique_graphs"] == graphs


def test_the_compiled_step_learns_what_the_plain_one_does(make_model: Models) -> None:
    directory = make_model("bfloat16", **SMALL, max_position_embeddings=4096)
    fast, plain = make(directory, micro_tokens=4096), make(directory, micro_tokens=4096, compile="off", attention="sdpa")
    for seed in range(3):
        batch = answers_of(32, 400, 2000, seed=seed, vocab=1000)
        check_alike([fast.step(batch)], [plain.step(batch)], *LEARNED, rel=5e-2, abs=5e-3)


@pytest.mark.parametrize("activations", ["auto", 0, 14])
def test_activations_fit_as_reckoned(qwen: Path, activations: Any) -> None:
    torch.cuda.empty_cache()
    trainer = make(qwen, activations=activations, micro_tokens=16_384)
    batch = answers_of(32, 1500, 8192, seed=0, vocab=151_936)
    first = trainer.step(batch)
    with Measured() as took:
        result = trainer.step(batch)
    for notice in first.notices:
        say(notice)
    speed = batch.num_tokens / took.ms * 1000
    say(f"0.6B, {activations=}: {took.ms / 1000:.2f} s, {speed:.0f} tokens/s, peak {took.peak:.1f} GiB, {result.choices}")
    assert result.micro_tokens == 16_384, "it was not out of memory"
