"""Divergences by candidates: between those of two outcomes and those of whole distributions, which torch.distributions knows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from streamrl.algorithms.divergences import Divergence, binary_divergence, candidate_divergence
from streamrl.algorithms.logprobs import LinearHead, linear_logprobs, token_logprobs
from streamrl.algorithms.policy import PolicyTokens, policy_loss
from streamrl.algorithms.recorded import Recorded
from streamrl.algorithms.sampler_losses import dppo
from streamrl.algorithms.sequences import Packed
from streamrl.config.loss import LossConfig
from streamrl.errors import TrainingError
from tests.algorithms.test_recorded import Problem, recorded
from tests.support.errors import raises

kinds = pytest.mark.parametrize("kind", ["topk_tv", "topk_kl"])
V = 11


def two(seed: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    """log pi and log mu, [rows, V] float64."""
    generator = torch.Generator().manual_seed(seed)
    mu = 3 * torch.randn(rows, V, generator=generator, dtype=torch.float64)
    return (mu + torch.randn(rows, V, generator=generator, dtype=torch.float64)).log_softmax(1), mu.log_softmax(1)


def by(pi: Tensor, mu: Tensor, candidates: Recorded, kind: Divergence, whole: bool = False) -> Tensor:
    return candidate_divergence(candidates.of(pi), candidates.of(mu), candidates, torch.full((len(pi),), whole), kind)


def of_all(pi: Tensor, mu: Tensor, kind: str) -> Tensor:
    if kind == "topk_tv":
        return (pi.exp() - mu.exp()).abs().sum(1) / 2
    return kl_divergence(Categorical(logits=mu), Categorical(logits=pi))


@kinds
@given(seed=st.integers(0, 10_000), order=st.permutations(range(V)))
def test_they_grow_with_each_candidate_from_two_outcomes_to_all(kind: Divergence, seed: int, order: list[int]) -> None:
    pi, mu = two(seed)
    last = binary_divergence(pi[:, order[0]], mu[:, order[0]], kind)
    for count in range(1, V + 1):
        kept = torch.zeros(1, V, dtype=torch.bool)
        kept[0, list(order[:count])] = True
        found = by(pi, mu, recorded(kept), kind)
        if count == 1:
            assert torch.allclose(found, last, rtol=0, atol=2e-5)
        assert (found >= last - 2e-5).all(), "but for the least that the others are taken for"
        last = found
    assert torch.allclose(last, of_all(pi, mu, kind), rtol=0, atol=1e-9)


@kinds
def test_of_a_whole_support_there_are_no_others(kind: Divergence) -> None:
    """Log-probs in single precision do not add up to 1: what is left is rounding, and no outcome."""
    pi, mu = two(3, rows=5)
    kept = mu > mu.sort(1).values[:, 5:6]
    pi, mu = (one.masked_fill(~kept, -torch.inf).log_softmax(1) for one in (pi, mu))
    found = by(pi.float(), mu.float(), recorded(kept), kind, whole=True)
    inside = kept.nonzero()
    p, q = (torch.zeros(5, V, dtype=torch.float64).index_put(tuple(inside.T), one[kept].exp()) for one in (pi, mu))
    expected = (p - q).abs().sum(1) / 2 if kind == "topk_tv" else torch.special.xlogy(q, q / p.clamp(min=1e-300)).sum(1)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


def test_a_policy_that_rules_a_candidate_out_is_infinitely_far_in_nats() -> None:
    pi, mu = two(0)
    pi[0, 3] = -torch.inf
    kept = torch.ones(1, V, dtype=torch.bool)
    assert by(pi, mu, recorded(kept), "topk_kl").tolist() == [float("inf")]
    assert by(pi, mu, recorded(kept), "topk_tv").isfinite().all()


@kinds
def test_of_equal_distributions_it_is_nothing(kind: Divergence) -> None:
    _, mu = two(1, rows=4)
    kept = mu > mu.median(1, keepdim=True).values
    near = by(mu.float(), mu.float(), recorded(kept), kind)
    assert near.abs().max() < 1e-9
    nothing = by(mu, mu, Recorded(torch.zeros(0).long(), torch.zeros(0).long(), torch.zeros(4).bool(), np.zeros(5, np.int64)), kind)
    assert nothing.tolist() == [0.0] * 4, "who has no candidates is not spoken of"


@pytest.mark.parametrize("how", ["linear", "callable"])
@pytest.mark.parametrize("chunk", [1 << 20, 2 * 23, 23])
@pytest.mark.parametrize("cut", [True, False])
def test_log_probs_of_candidates_are_those_of_the_whole_softmax(how: str, chunk: int, cut: bool) -> None:
    problem = Problem()
    z = problem.logits(problem.new)
    likeliest = torch.zeros_like(problem.kept).scatter(1, z.topk(4).indices, True).scatter(1, problem.targets[:, None], True)
    likeliest[2] = False
    likeliest[4:6] = False
    asked = recorded(problem.kept if cut else likeliest)
    logp = (z.masked_fill(~problem.kept, -torch.inf) if cut else z).log_softmax(1)
    weight = problem.new.clone().requires_grad_()
    options: dict[str, object] = {"temperature_M": problem.temperature, "chunk_elements": chunk, "candidates": asked}
    if cut:
        options["recorded"] = asked
    if how == "linear":
        logprobs, _, found = linear_logprobs(problem.hidden, problem.targets, LinearHead(weight), **options)  # type: ignore[arg-type]
    else:
        logprobs, _, found = token_logprobs(problem.hidden, problem.targets, lambda h: h @ weight.T, vocab_size=23, **options)  # type: ignore[arg-type]
    assert torch.allclose(found, logp[asked.token, asked.ids], rtol=0, atol=1e-12)
    assert logprobs.requires_grad and not found.requires_grad
    logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


def test_dppo_and_the_policy_loss_go_by_it() -> None:
    logprobs, mu = torch.tensor([-0.5, -0.5, -1.5, -1.5]), torch.tensor([-1.0] * 4)
    advantages, apart = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([0.3, 0.1, 0.3, 0.1])
    _, metrics = dppo(logprobs, mu, advantages, apart, bound=0.2, kl=0.0)
    assert metrics["train/pg_clipfrac"].tolist() == [1, 0, 1, 0]
    _, metrics = dppo(logprobs, mu, advantages, torch.full((4,), torch.inf), bound=0.2, kl=0.0)
    assert metrics["train/pg_clipfrac"].tolist() == [1] * 4
    ages = torch.zeros(2, dtype=torch.int64)
    logprobs, anchor, advantages = (torch.tensor(values) for values in ([-0.5, -2.0], [-1.0, -1.0], [1.0, 1.0]))
    tokens = PolicyTokens(logprobs, anchor, anchor, advantages, ages, Packed(ages, 1))
    config = LossConfig(policy="dppo", dppo_divergence="topk_tv")
    with raises(TrainingError, policy="dppo"):
        policy_loss(tokens, config)
    loss, metrics = policy_loss(tokens._replace(apart=torch.tensor([0.3, 0.3])), config)
    assert metrics["train/pg_clipfrac"].tolist() == [1, 0], "the second has fallen, which its advantage does not push on"
    assert loss.isfinite().all()
