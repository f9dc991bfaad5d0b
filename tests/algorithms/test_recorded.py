"""Log-probs over the recorded support: those of a plain masked softmax in float64, and importance weights whose mean under mu is 1."""

import numpy as np
import pytest
import torch
from torch import Tensor

from streamrl.algorithms.logprobs import LinearHead, linear_logprobs, token_logprobs
from streamrl.algorithms.nucleus import support
from streamrl.algorithms.recorded import Recorded

M, H, V = 7, 5, 23
TOP_P, TOP_K = torch.full((M,), 0.8), torch.full((M,), 9)


def recorded(kept_MV: Tensor, said: Tensor | None = None) -> Recorded:
    kept = kept_MV if said is None else kept_MV & said[:, None]
    token, ids = kept.nonzero().unbind(1)
    counts = kept.sum(1)
    return Recorded(ids, token, counts > 0, np.concatenate([[0], counts.cumsum(0).numpy()]))


class Problem:
    """Old weights that sampled, and new ones under training; float64."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden, self.old = normal(M, H), normal(V, H)
        self.new = self.old + 0.7 * normal(V, H)
        self.temperature = torch.linspace(0.5, 1.5, M, dtype=torch.float64)
        z = self.logits(self.old)
        first = z.argmax(1)
        self.kept = support(z, first, TOP_P, TOP_K)
        self.mu = z.masked_fill(~self.kept, -torch.inf).log_softmax(1)
        self.targets = torch.multinomial(self.mu.exp(), 1, generator=generator)[:, 0]

    def logits(self, weight: Tensor) -> Tensor:
        return self.hidden @ weight.T / self.temperature[:, None]

    def found(
        self, weight: Tensor, how: str, *, targets: Tensor | None = None, chunk: int = 1 << 20, **more: object
    ) -> tuple[Tensor, Tensor]:
        targets = self.targets if targets is None else targets
        more |= {"temperature_M": self.temperature, "top_p_M": TOP_P, "top_k_M": TOP_K, "chunk_elements": chunk}
        if how == "linear":
            return linear_logprobs(self.hidden, targets, LinearHead(weight), **more)  # type: ignore[arg-type]
        return token_logprobs(self.hidden, targets, lambda states: states @ weight.T, vocab_size=V, **more)  # type: ignore[arg-type]


forms = pytest.mark.parametrize("how", ["linear", "callable"])
chunks = pytest.mark.parametrize("chunk", [1 << 20, 2 * V, V])


@forms
@chunks
def test_they_and_their_gradients_are_those_of_a_masked_softmax(how: str, chunk: int) -> None:
    problem = Problem()
    plain, ours = (problem.new.clone().requires_grad_() for _ in range(2))
    logp = problem.logits(plain).masked_fill(~problem.kept, -torch.inf).log_softmax(1)
    expected = logp.gather(1, problem.targets[:, None])[:, 0]
    logprobs, entropy = problem.found(ours, how, chunk=chunk, recorded=recorded(problem.kept))
    weights = torch.arange(1.0, M + 1, dtype=torch.float64)
    (expected * weights).sum().backward()
    (logprobs * weights).sum().backward()
    assert torch.allclose(logprobs, expected, rtol=0, atol=1e-12)
    assert torch.allclose(entropy, -torch.special.xlogy(logp.exp(), logp.exp()).sum(1), rtol=0, atol=1e-12)
    assert plain.grad is not None and ours.grad is not None
    assert torch.allclose(ours.grad, plain.grad, rtol=0, atol=1e-12)


@forms
def test_with_the_weights_that_sampled_it_changes_nothing(how: str) -> None:
    problem = Problem()
    ours = problem.found(problem.old, how, recorded=recorded(problem.kept))
    assert [torch.equal(a, b) for a, b in zip(ours, problem.found(problem.old, how), strict=True)] == [True, True]
    assert torch.allclose(ours[0], problem.mu.gather(1, problem.targets[:, None])[:, 0], rtol=0, atol=1e-12)


@forms
@pytest.mark.parametrize("seed", range(4))
def test_the_weight_of_newer_weights_has_mean_one_under_the_sampler(how: str, seed: int) -> None:
    """E_mu[pi_S / mu_S] = 1, summed over the support. With the support that the newer weights would leave it is something else."""
    problem = Problem(seed)
    mean = torch.zeros(2, M, dtype=torch.float64)
    for token in range(V):
        inside = problem.kept[:, token]
        targets = torch.where(inside, token, problem.targets)
        for row, inputs in enumerate((recorded(problem.kept), None)):
            pi, _ = problem.found(problem.new, how, targets=targets, recorded=inputs)
            mean[row] += torch.where(inside, problem.mu[:, token].exp() * (pi - problem.mu[:, token]).exp(), 0.0)
    assert torch.allclose(mean[0], torch.ones(M, dtype=torch.float64), rtol=0, atol=1e-12)
    assert ((mean[1] - 1).abs() > 1e-3).any()


@forms
@chunks
def test_where_nothing_was_recorded_the_own_cut_counts(how: str, chunk: int) -> None:
    problem = Problem()
    said = torch.arange(M) % 3 != 1
    mixed = problem.found(problem.new, how, chunk=chunk, recorded=recorded(problem.kept, said))
    whole = problem.found(problem.new, how, chunk=chunk, recorded=recorded(problem.kept))
    own = problem.found(problem.new, how, chunk=chunk)
    for found, theirs, ours in zip(mixed, whole, own, strict=True):
        assert torch.allclose(found, torch.where(said, theirs, ours), rtol=0, atol=1e-13)
