"""Chunked log-probs: against log_softmax in float64, with gradients, chunking and truncation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamrl.core.logprobs import support, token_logprobs

M, H, V = 13, 5, 11


@pytest.fixture
def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(M, H, dtype=torch.float64, generator=generator)
    weight = torch.randn(V, H, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, V, (M,), generator=generator)
    temperature = torch.rand(M, dtype=torch.float64, generator=generator) + 0.5
    return hidden, weight, targets, temperature


@pytest.mark.parametrize("chunk_elements", [1, 3 * V, 1 << 20])
def test_equals_log_softmax_with_its_gradient_for_any_chunk(problem: tuple[Tensor, Tensor, Tensor, Tensor], chunk_elements: int) -> None:
    hidden, weight, targets, temperature = problem
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logprobs, entropy = token_logprobs(
        ours[0], targets, lambda h: h @ ours[1].T, vocab_size=V, temperature_M=temperature, chunk_elements=chunk_elements
    )
    plain = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    full = ((plain[0] @ plain[1].T) / temperature[:, None]).log_softmax(-1)
    assert torch.allclose(logprobs, full.gather(-1, targets[:, None])[:, 0], atol=1e-12)
    assert torch.allclose(entropy, -(full.exp() * full).sum(-1), atol=1e-12)
    assert not entropy.requires_grad
    coefficients = torch.arange(M, dtype=torch.float64)
    (logprobs * coefficients).sum().backward()
    (full.gather(-1, targets[:, None])[:, 0] * coefficients).sum().backward()
    for mine, reference in zip(ours, plain, strict=True):
        assert mine.grad is not None and reference.grad is not None
        assert torch.allclose(mine.grad, reference.grad, atol=1e-12)


def test_never_makes_more_logits_than_a_chunk_at_once(problem: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets, temperature = problem
    sizes: list[int] = []

    def head(part: Tensor) -> Tensor:
        sizes.append(part.shape[0] * V)
        return part @ weight.T

    logprobs, _ = token_logprobs(hidden.requires_grad_(), targets, head, vocab_size=V, temperature_M=temperature, chunk_elements=4 * V)
    logprobs.sum().backward()
    assert max(sizes) <= 4 * V
    assert sum(sizes) == 2 * M * V  # once forward, once again in the backward pass


def test_top_k_and_top_p_renormalise_over_what_is_kept() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    kept = support(logits.repeat(4, 1), torch.tensor([0, 0, 0, 3]), torch.tensor([1.0, 0.79, 0.81, 0.5]), torch.tensor([2, -1, -1, -1]))
    assert kept.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    logprobs, entropy = token_logprobs(
        logits,
        torch.tensor([1]),
        lambda h: h,
        vocab_size=4,
        temperature_M=torch.ones(1),
        top_p_M=torch.tensor([0.79]),
        top_k_M=torch.tensor([-1]),
    )
    assert logprobs.exp().tolist() == pytest.approx([0.3 / 0.8])
    assert entropy.tolist() == pytest.approx([-(0.375 * torch.tensor(0.375).log() + 0.625 * torch.tensor(0.625).log()).item()], abs=1e-6)


def test_ties_keep_the_lower_id() -> None:
    assert support(torch.zeros(1, 4), torch.tensor([0]), torch.tensor([1.0]), torch.tensor([2])).tolist() == [[1, 1, 0, 0]]
