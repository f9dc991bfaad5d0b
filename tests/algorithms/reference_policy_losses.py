"""A second implementation of the losses, written from the papers' equations: one token after the other, in float64.

Objectives are written as the papers maximise them and negated at the end. Where a paper states a gradient, the surrogate here is
its coefficient as a plain float times what is differentiated. It shares no line and no helper with `streamrl.core`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Token:
    logp: Tensor
    """A leaf of one element."""
    old: float
    mu: float
    ref: float
    advantage: float
    trained: bool


Sequence = list[Token]
PerToken = list[list[Tensor | None]]
"""None where a token is not trained."""


def _each(sequences: list[Sequence], objective: Callable[[Token], Tensor]) -> PerToken:
    return [[-objective(token) if token.trained else None for token in sequence] for sequence in sequences]


def _ppo_objective(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A) by cases: outside its side of the interval the objective is flat."""
    value = ratio.item()
    if advantage > 0 and value > 1 + high:
        return ratio * 0.0 + (1 + high) * advantage
    if advantage < 0 and value < 1 - low:
        return ratio * 0.0 + (1 - low) * advantage
    return ratio * advantage


def ppo(sequences: list[Sequence], low: float, high: float, dual: float) -> PerToken:
    def objective(token: Token) -> Tensor:
        inner = _ppo_objective(torch.exp(token.logp - token.old), token.advantage, low, high)
        if dual and token.advantage < 0 and inner.item() < dual * token.advantage:
            return inner * 0.0 + dual * token.advantage
        return inner

    return _each(sequences, objective)


def gspo(sequences: list[Sequence], low: float, high: float) -> PerToken:
    losses: PerToken = []
    for sequence in sequences:
        trained = [token for token in sequence if token.trained]
        if not trained:
            losses.append([None] * len(sequence))
            continue
        likelihood: Tensor | float = 1.0
        for token in trained:
            likelihood = likelihood * torch.exp(token.logp - token.old)
        assert isinstance(likelihood, Tensor)
        ratio = likelihood ** (1.0 / len(trained))
        losses.append([-_ppo_objective(ratio, token.advantage, low, high) if token.trained else None for token in sequence])
    return losses


def gspo_token(sequences: list[Sequence], low: float, high: float) -> PerToken:
    """s_t = s, a plain float, times pi_t over its own value: the gradient is the token's own."""
    losses: PerToken = []
    for sequence in sequences:
        trained = [token for token in sequence if token.trained]
        ratio = math.exp(sum(token.logp.item() - token.old for token in trained) / max(len(trained), 1))
        own = [torch.exp(token.logp) / math.exp(token.logp.item()) * ratio for token in sequence]
        losses.append(
            [-_ppo_objective(r, token.advantage, low, high) if token.trained else None for r, token in zip(own, sequence, strict=True)]
        )
    return losses


def gmpo(sequences: list[Sequence], low: float, high: float) -> PerToken:
    """(prod over tokens of min(r^sign, bound)^sign)^(1/n) A, with bounds e^high above 1 and e^low for the reciprocal."""
    losses: PerToken = []
    for sequence in sequences:
        trained = [token for token in sequence if token.trained]
        product: Tensor = torch.ones((), dtype=torch.float64)
        for token in trained:
            ratio = torch.exp(token.logp - token.old)
            if token.advantage > 0 and ratio.item() > math.exp(high):
                ratio = ratio * 0.0 + math.exp(high)
            if token.advantage < 0 and 1.0 / ratio.item() > math.exp(low):
                ratio = ratio * 0.0 + math.exp(-low)
            product = product * ratio
        mean = product ** (1.0 / max(len(trained), 1))
        losses.append([-mean * token.advantage if token.trained else None for token in sequence])
    return losses


def cispo(sequences: list[Sequence], low: float, high: float) -> PerToken:
    def objective(token: Token) -> Tensor:
        ratio = math.exp(token.logp.item() - token.old)
        return min(max(ratio, 1 - low), 1 + high) * token.advantage * token.logp

    return _each(sequences, objective)


def sapo(sequences: list[Sequence], tau_positive: float, tau_negative: float) -> PerToken:
    def objective(token: Token) -> Tensor:
        tau = tau_positive if token.advantage > 0 else tau_negative
        ratio = torch.exp(token.logp - token.old)
        return 4.0 / tau / (1.0 + torch.exp(-tau * (ratio - 1.0))) * token.advantage

    return _each(sequences, objective)


def aipo(sequences: list[Sequence], cap: float) -> PerToken:
    def objective(token: Token) -> Tensor:
        return min(math.exp(token.logp.item()) / math.exp(token.mu), cap) * token.advantage * token.logp

    return _each(sequences, objective)


def dppo(
    sequences: list[Sequence], bound: float, kl: float, *, low: float | None = None, divergence: str = "tv", symmetric: bool = False
) -> PerToken:
    """M of equation 12 of arXiv 2602.04879 by its cases, with D of the distributions (p, 1 - p) as sums over the two outcomes."""

    def objective(token: Token) -> Tensor:
        new, old = math.exp(token.logp.item()), math.exp(token.mu)
        outcomes = ((old, new), (1.0 - old, 1.0 - new))
        by = {"tv": lambda p, q: abs(p - q) / 2.0, "kl": lambda p, q: p * math.log(p / q)}[divergence]
        far = sum(by(p, q) for p, q in outcomes)
        difference = token.logp - token.mu
        penalty = kl * difference * difference
        over = far > (bound if new > old or low is None else low) and new != old
        pushed_on = (token.advantage > 0 and new > old) or (token.advantage < 0 and new < old)
        if over and (symmetric or pushed_on):
            return -penalty
        return torch.exp(difference) * token.advantage - penalty

    return _each(sequences, objective)


def vespo(sequences: list[Sequence], positive: tuple[float, float], negative: tuple[float, float]) -> PerToken:
    """Equation 20 of arXiv 2602.10693: W as the quotient of two products of probabilities, the kernel as a plain float."""
    losses: PerToken = []
    for sequence in sequences:
        trained = [token for token in sequence if token.trained]
        whole = math.prod(math.exp(token.logp.item()) for token in trained) / math.prod(math.exp(token.mu) for token in trained)
        found: list[Tensor | None] = []
        for token in sequence:
            c1, c2 = positive if token.advantage > 0 else negative
            kernel = whole**c1 * math.exp(c2 * (1.0 - whole))
            found.append(-kernel * token.advantage * token.logp if token.trained else None)
        losses.append(found)
    return losses


def m2po(sequences: list[Sequence], gone: Callable[[Token], bool]) -> PerToken:
    """Equation 5 of arXiv 2510.01161: M r A, where `gone` tells M = 0."""
    return _each(sequences, lambda token: torch.exp(token.logp - token.mu) * token.advantage * (not gone(token)))


def clip_cov(sequences: list[Sequence], low: float, high: float, picked: Callable[[Token], bool]) -> PerToken:
    """Equation 12 of arXiv 2505.22617 over PPO's clip: 0 for what is picked."""

    def objective(token: Token) -> Tensor:
        if picked(token):
            return token.logp * 0.0
        return _ppo_objective(torch.exp(token.logp - token.old), token.advantage, low, high)

    return _each(sequences, objective)


def kl_cov(sequences: list[Sequence], coef: float, picked: Callable[[Token], bool]) -> PerToken:
    """Equation 14 of arXiv 2505.22617, with |log pi - log pi_old| for the KL."""

    def objective(token: Token) -> Tensor:
        value = torch.exp(token.logp) / math.exp(token.old) * token.advantage
        return value - coef * torch.abs(token.logp - token.old) if picked(token) else value

    return _each(sequences, objective)


def opsm(sequences: list[Sequence], delta: float) -> list[list[bool]]:
    """M of equation 9 of DeepSeek-V3.2, whose pi_old is the sampler: whether each token is kept; untrained ones are."""
    kept: list[list[bool]] = []
    for sequence in sequences:
        gaps = [token.mu - token.logp.item() for token in sequence if token.trained]
        drifted = bool(gaps) and sum(gaps) / len(gaps) > delta
        kept.append([not (drifted and token.trained and token.advantage < 0) for token in sequence])
    return kept


def value(new: Tensor, old: float, target: float, clip: float) -> Tensor:
    """The greater of two squared errors, by cases."""
    plain = (new - target) ** 2
    if clip == 0 or abs(new.item() - old) <= clip:
        return plain
    edge = old + clip if new.item() > old else old - clip
    return new * 0.0 + (edge - target) ** 2 if (edge - target) ** 2 > plain.item() else plain


def kl(sequences: list[Sequence], estimator: str, unbiased: bool) -> PerToken:
    def one(token: Token) -> Tensor:
        quotient = torch.exp(token.ref - token.logp)
        by_name = {
            "k1": -torch.log(quotient),
            "k2": 0.5 * torch.log(quotient) ** 2,
            "k3": quotient - torch.log(quotient) - 1.0,
            "abs": torch.abs(torch.log(quotient)),
        }
        estimate = by_name["k3" if estimator == "low_var_kl" else estimator.rstrip("+")]
        if estimator.endswith("+"):  # the value as a plain float, and what is left of k2 where its own value is taken off
            estimate = by_name["k2"] - by_name["k2"].item() + estimate.item()
        if estimator == "low_var_kl" and estimate.item() > 10.0:
            estimate = estimate * 0.0 + 10.0
        return -estimate * torch.exp(token.logp - token.old) if unbiased else -estimate

    return _each(sequences, one)
