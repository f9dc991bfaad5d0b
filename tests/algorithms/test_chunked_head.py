"""The head that is made to be compiled: held to the same log_softmax written out in float64 as the other two, compiled and not."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from streamrl.algorithms import chunked_head
from streamrl.algorithms.chunked_head import CHUNK_LOGITS, CHUNK_TOKENS, chunk_kernels, chunked_logprobs, keeps_probabilities
from streamrl.algorithms.fused_head import Plan
from streamrl.algorithms.logprobs import LinearHead
from streamrl.trainers import activations
from tests.algorithms.test_logprobs import Case, Largest, M, Problem, V, grads, hold_to_log_softmax, leaves, problem, rounded, written_out
from tests.support.compilers import COMPILES

__all__ = ["problem"]
KERNELS = chunk_kernels(V, compiled=False)
LENGTHS = [1, 5, M, 4 * M]


def chunked(given: Problem, case: Case, *, tokens: int, kernels: Any = KERNELS, **more: Any) -> tuple[Tensor, Tensor]:
    head = LinearHead(given.weight, given.bias, case.scale, case.softcap)
    kernels = kernels._replace(tokens=tokens)
    return chunked_logprobs(given.hidden, given.targets, head, temperature_M=given.temperature, kernels=kernels, **more)


@pytest.mark.parametrize("case", [Case(), Case(scale=0.25), Case(scale=3.0, softcap=1.5)])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_equals_log_softmax_with_its_gradient(problem: Problem, case: Case, tokens: int, entropy_gradient: bool) -> None:
    hold_to_log_softmax(problem, case, partial(chunked, tokens=tokens), entropy_gradient)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_probabilities_that_are_kept_give_the_gradients_of_those_computed_again(
    problem: Problem, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[Tensor]] = []
    for most in (chunked_head.KEPT_BYTES, 0):
        monkeypatch.setattr(chunked_head, "KEPT_BYTES", most)
        ours = leaves(problem, dtype)
        logprobs, _ = chunked(ours, Case(scale=0.25), tokens=5)
        assert keeps_probabilities(M, V, ours.hidden.element_size(), Plan(0)) == (most > 0)
        (logprobs @ (torch.arange(M, dtype=logprobs.dtype) - 3)).backward()
        found.append([gradient.double() for gradient in grads(ours)])
    for kept, again in zip(*found, strict=True):
        assert torch.allclose(kept, again, rtol=2e-2 if dtype == torch.bfloat16 else 1e-12, atol=1e-2 if dtype == torch.bfloat16 else 1e-12)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.process, *COMPILES])])
def test_narrow_types_are_summed_in_float32_also_when_it_is_compiled(
    problem: Problem, dtype: torch.dtype, close: float, compiled: bool
) -> None:
    case = Case(scale=0.5, softcap=2.0)
    ours = leaves(problem, dtype)
    plain = leaves(rounded(ours))
    logprobs, entropy = chunked(ours, case, tokens=5, kernels=chunk_kernels(V, compiled=compiled), entropy_gradient=True)
    expected, expected_entropy = written_out(plain, case)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs.double(), expected, atol=3e-6) and torch.allclose(entropy.double(), expected_entropy, atol=3e-6)
    (logprobs.sum() + entropy.sum()).backward()
    (expected.sum() + expected_entropy.sum()).backward()
    for mine, reference in zip(grads(ours), grads(plain), strict=True):
        assert mine.dtype == dtype and torch.allclose(mine.double(), reference, rtol=close, atol=2e-6)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_token_that_counts_for_nothing_reaches_nothing_whatever_it_holds(problem: Problem, tokens: int) -> None:
    others = torch.arange(M) != 4
    broken = leaves(problem._replace(hidden=problem.hidden.masked_fill(~others[:, None], torch.nan)))
    logprobs, entropy = chunked(broken, Case(), tokens=tokens, entropy_gradient=True)
    assert torch.equal(logprobs.isnan(), ~others)
    (logprobs[others].sum() + entropy[others].sum()).backward()
    plain = leaves(problem)
    expected, expected_entropy = written_out(plain, Case())
    (expected[others].sum() + expected_entropy[others].sum()).backward()
    for mine, reference in zip(grads(broken), grads(plain), strict=True):
        assert torch.allclose(mine, reference, atol=1e-12)


def test_no_tokens_have_no_gradient_and_no_more_than_a_chunk_of_logits_is_there(problem: Problem) -> None:
    none = leaves(problem._replace(**{name: getattr(problem, name)[:0] for name in ("hidden", "targets", "temperature")}))
    logprobs, entropy = chunked(none, Case(), tokens=4)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not grads(none)[1].any()
    ours = leaves(problem)
    with Largest() as largest:
        chunked(ours, Case(), tokens=2)[0].sum().backward()
    assert largest.elements == max(2 * V, ours.weight.numel())
    assert (activations.CHUNK_TOKENS, activations.KEPT_BYTES) == (CHUNK_TOKENS, chunked_head.KEPT_BYTES)


@pytest.mark.parametrize(("vocab", "tokens"), [(16, CHUNK_TOKENS), (151_936, 4096), (262_144, 4096), (CHUNK_LOGITS * 2, 1)])
def test_chunks_are_as_long_as_logits_allow(vocab: int, tokens: int) -> None:
    assert chunk_kernels(vocab, compiled=False).tokens == tokens
