"""Each policy loss beside the second implementation that it is held to, with the numbers that tests run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.policy_losses import cispo, clip_cov, gmpo, gspo, gspo_token, kl_cov, ppo_clip, sapo
from streamrl.algorithms.sampler_losses import Divergence, aipo, dppo, m2po, vespo
from tests.algorithms import reference_policy_losses as reference
from tests.algorithms.policy_cases import Layout

Loss = tuple[Tensor, dict[str, Tensor]]
Ours = Callable[[Layout], Loss]
Theirs = Callable[[list[reference.Sequence]], reference.PerToken]


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ppo_pair(low: float, high: float, dual: float) -> tuple[Ours, Theirs]:
    return (
        lambda x: ppo_clip(x.logprobs, x.old, x.advantages, clip_low=low, clip_high=high, dual_clip=dual),
        partial(reference.ppo, low=low, high=high, dual=dual),
    )


def gspo_pair(low: float, high: float) -> tuple[Ours, Theirs]:
    return (
        lambda x: gspo(x.logprobs, x.old, x.advantages, x.sequences, clip_low=low, clip_high=high),
        partial(reference.gspo, low=low, high=high),
    )


def gspo_token_pair(low: float, high: float) -> tuple[Ours, Theirs]:
    return (
        lambda x: gspo_token(x.logprobs, x.old, x.advantages, x.sequences, clip_low=low, clip_high=high),
        partial(reference.gspo_token, low=low, high=high),
    )


def gmpo_pair(low: float, high: float) -> tuple[Ours, Theirs]:
    return (
        lambda x: gmpo(x.logprobs, x.old, x.advantages, x.sequences, log_low=low, log_high=high),
        partial(reference.gmpo, low=low, high=high),
    )


def cispo_pair(low: float, high: float) -> tuple[Ours, Theirs]:
    return (
        lambda x: cispo(x.logprobs, x.old, x.advantages, clip_low=low, clip_high=high),
        partial(reference.cispo, low=low, high=high),
    )


def sapo_pair(positive: float, negative: float) -> tuple[Ours, Theirs]:
    return (
        lambda x: sapo(x.logprobs, x.old, x.advantages, tau_positive=positive, tau_negative=negative),
        partial(reference.sapo, tau_positive=positive, tau_negative=negative),
    )


def aipo_pair(cap: float) -> tuple[Ours, Theirs]:
    return lambda x: aipo(x.logprobs, x.mu, x.advantages, cap=cap), partial(reference.aipo, cap=cap)


def dppo_pair(
    bound: float, kl: float, low: float | None = None, divergence: Divergence = "tv", symmetric: bool = False
) -> tuple[Ours, Theirs]:
    how: dict[str, Any] = {"bound": bound, "kl": kl, "divergence": divergence, "symmetric": symmetric}
    return (
        lambda x: dppo(x.logprobs, x.mu, x.advantages, bound_low=low or 0.0, **how),
        partial(reference.dppo, low=low, **how),
    )


def m2po_pair(far: float) -> tuple[Ours, Theirs]:
    """With tokens beyond a distance in the place of those that a whole step's choice leaves out."""
    return (
        lambda x: m2po(x.logprobs, x.mu, x.advantages, (x.logprobs.detach() - x.mu).abs() > far),
        partial(reference.m2po, gone=lambda token: abs(token.logp.item() - token.mu) > far),
    )


def vespo_pair(positive: tuple[float, float], negative: tuple[float, float]) -> tuple[Ours, Theirs]:
    names = {"c1_positive": positive[0], "c2_positive": positive[1], "c1_negative": negative[0], "c2_negative": negative[1]}
    return (
        lambda x: vespo(x.logprobs, x.mu, x.advantages, x.sequences, **names),
        partial(reference.vespo, positive=positive, negative=negative),
    )


def clip_cov_pair(low: float, high: float) -> tuple[Ours, Theirs]:
    """With tokens of a log-prob above -1 in the place of those that a whole step's choice detaches."""
    return (
        lambda x: clip_cov(x.logprobs, x.old, x.advantages, x.logprobs.detach() > -1.0, clip_low=low, clip_high=high),
        partial(reference.clip_cov, low=low, high=high, picked=lambda token: token.logp.item() > -1.0),
    )


def kl_cov_pair(coef: float) -> tuple[Ours, Theirs]:
    """With tokens of a log-prob above -1 in the place of those that a whole step's choice penalises."""
    return (
        lambda x: kl_cov(x.logprobs, x.old, x.advantages, x.logprobs.detach() > -1.0, coef=coef),
        partial(reference.kl_cov, coef=coef, picked=lambda token: token.logp.item() > -1.0),
    )


PAIRS = {
    "ppo": ppo_pair(0.2, 0.28, 0.0),
    "ppo_narrow": ppo_pair(0.05, 0.1, 0.0),
    "ppo_dual": ppo_pair(0.2, 0.28, 1.3),
    "gspo": gspo_pair(0.2, 0.28),
    "gspo_narrow": gspo_pair(3e-4, 4e-4),
    "gspo_token": gspo_token_pair(0.2, 0.28),
    "gspo_token_narrow": gspo_token_pair(3e-4, 4e-4),
    "gmpo": gmpo_pair(0.4, 0.4),
    "gmpo_narrow": gmpo_pair(0.1, 0.05),
    "cispo": cispo_pair(1.0, 0.5),
    "cispo_both": cispo_pair(0.2, 0.28),
    "sapo": sapo_pair(1.0, 1.05),
    "sapo_steep": sapo_pair(0.5, 4.0),
    "aipo": aipo_pair(1.4),
    "dppo": dppo_pair(0.1, 1e-3),
    "dppo_plain": dppo_pair(0.02, 0.0),
    "dppo_two": dppo_pair(0.1, 1e-3, low=0.03),
    "dppo_symmetric": dppo_pair(0.1, 0.0, low=0.03, symmetric=True),
    "dppo_kl": dppo_pair(0.02, 1e-3, low=0.01, divergence="kl"),
    "dppo_kl_symmetric": dppo_pair(0.02, 0.0, divergence="kl", symmetric=True),
    "vespo": vespo_pair((2.0, 3.0), (3.0, 2.0)),
    "vespo_flat": vespo_pair((0.5, 0.2), (1.0, 0.7)),
    "m2po": m2po_pair(0.4),
    "clip_cov": clip_cov_pair(0.2, 0.28),
    "kl_cov": kl_cov_pair(0.7),
}
