"""How far a policy has gone from its sampler at a token, by a part of their distributions. Letters: `M` tokens, `S` candidates of all.

Tokens that are looked at one by one, and all others as one: a coarser view of two distributions never lets them seem further apart.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from streamrl.algorithms.recorded import Recorded

Divergence = Literal["tv", "kl", "topk_tv", "topk_kl"]
_LEAST = 1e-6
"""Of the probability of all others: what rounding leaves of 1 less a sum in single precision."""


def binary_divergence(logprobs: Tensor, sampler_logprobs: Tensor, divergence: Divergence) -> Tensor:
    """Of mu from pi, each taken as two outcomes: the sampled token and all others. arXiv 2602.04879, equations 13 and 14.

    tv: |pi - mu|. kl: mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), infinite where pi holds no other token for possible and mu does.
    Both are at most those of the whole distributions.

    Args:
        logprobs: log pi, at most 0.
        sampler_logprobs: log mu, at most 0.
        divergence: which of the two.
    """
    policy, sampler = logprobs.exp(), sampler_logprobs.exp()
    if divergence in ("tv", "topk_tv"):
        return (policy - sampler).abs()
    # 1 - p without the cancellation of a p near 1; rounding may leave a log-prob just above 0.
    others, before = -torch.expm1(logprobs.clamp(max=0.0)), -torch.expm1(sampler_logprobs.clamp(max=0.0))
    return sampler * (sampler_logprobs - logprobs) + torch.xlogy(before, before) - torch.xlogy(before, others)


def candidate_divergence(
    logprobs_S: Tensor, sampler_logprobs_S: Tensor, recorded: Recorded, whole_M: Tensor, divergence: Divergence
) -> Tensor:
    """Of mu from pi, each taken as its candidates C and all other tokens as one: [M] float64, 0 where a token has no candidates.

    With pi' = 1 - sum_C pi and mu' = 1 - sum_C mu, topk_tv: (sum_C |pi - mu| + |pi' - mu'|) / 2; topk_kl: sum_C mu log(mu / pi) +
    mu' log(mu' / pi'). With the sampled token alone they are `binary_divergence`, with all tokens the divergences themselves, and between
    the two they grow with every candidate. pi' and mu' are at least 1e-6 in the second.

    Args:
        logprobs_S: log pi of the candidates.
        sampler_logprobs_S: log mu of the candidates.
        recorded: whose candidates they are.
        whole_M: bool, tokens whose candidates are all that mu and pi hold for possible: pi' and mu' are 0.
        divergence: which of the two.
    """
    policy, sampler = logprobs_S.double().exp(), sampler_logprobs_S.double().exp()

    def sums(values_S: Tensor) -> Tensor:
        return values_S.new_zeros(len(recorded.said)).index_add_(0, recorded.token, values_S)

    left = recorded.said & ~whole_M
    if divergence == "topk_tv":
        others = (sums(policy) - sums(sampler)).abs()
        return (sums((policy - sampler).abs()) + torch.where(left, others, 0.0)) / 2
    others, before = ((1.0 - sums(probs)).clamp(min=_LEAST) for probs in (policy, sampler))
    inside = sums(sampler * (sampler_logprobs_S.double() - logprobs_S.double()))
    return inside + torch.where(left, before * (before / others).log(), 0.0)
