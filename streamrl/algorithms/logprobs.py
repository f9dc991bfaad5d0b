"""Log-probs and entropies of chosen tokens from hidden states, a bounded number of logits at a time.

Two forms. `linear_logprobs` knows the head's weight: a fused function with a backward pass of its own, which needs no more than the bound
anywhere. `token_logprobs` takes any head as a callable: chunk by chunk under activation checkpointing.
Letters: `M` predicted tokens, `H` hidden size, `V` vocabulary, `C` tokens of a chunk. Chunks are cut from the front in order, so equal
inputs and an equal bound give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from streamrl.algorithms.fused_head import Cut, FusedHead, Plan
from streamrl.algorithms.logit_bias import LogitBias
from streamrl.algorithms.recorded import Recorded

CHUNK_ELEMENTS = 1 << 25
"""Logits in memory at a time: 128 MiB of float32."""
GPU_CHUNK_ELEMENTS = 1 << 27
"""On a GPU: 512 MiB, and some 3 GiB with what is derived from them; 883 tokens of a vocabulary of 151,936."""


class LinearHead(NamedTuple):
    """logits = cap(scale (W h + b)) with cap(x) = softcap tanh(x / softcap)."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    """Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`."""
    softcap: float = 0.0
    """Gemma's `final_logit_softcapping`; 0: off."""


def linear_logprobs(
    hidden_MH: Tensor,
    targets_M: Tensor,
    head: LinearHead,
    *,
    temperature_M: Tensor,
    top_p_M: Tensor | None = None,
    top_k_M: Tensor | None = None,
    min_p_M: Tensor | None = None,
    recorded: Recorded | None = None,
    candidates: Recorded | None = None,
    logit_bias: LogitBias | None = None,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, ...]:
    """Log pi(target | state) = z_target - logsumexp(z) with z = (logits + bias) / temperature, over the kept tokens where truncated.

    Logits are float32 whatever the type of states and weight, as are all sums over tokens and vocabulary. On a GPU the logits' gradient is
    rounded to the states' type before it meets the weight. Of gradients there are the first ones only.

    Args:
        hidden_MH: [M, H] states that predict the targets; bfloat16, float16, float32 or float64.
        targets_M: [M] int64 token ids.
        head: weight and bias of the states' type.
        temperature_M: [M] above 0.
        top_p_M: [M] float32, 1.0 = off; None = all off.
        top_k_M: [M] int64, -1 = off; None = all off.
        min_p_M: [M] float32, 0.0 = off; None = all off.
        recorded: all that could be drawn, in place of what these three leave; None: nothing is said.
        candidates: tokens whose log-probs are wanted beside the targets'; None: there are none.
        logit_bias: added before the temperature; None: nothing.
        entropy_gradient: whether the entropies carry a gradient.
        chunk_elements: bound of the logits in memory at a time; a token's whole vocabulary is there all the same. Whatever fits
            into it at once is kept for the backward pass, else logits are computed again there.

    Returns:
        [M] log-probs, which carry the gradient, and [M] entropies in nats; float32, of float64 states float64. With `candidates` their
        log-probs too, [S], without a gradient.
    """
    remember = torch.is_grad_enabled()
    plan = Plan(chunk_elements, head.scale, head.softcap, entropy_gradient, remember)
    cut = _cut(targets_M, top_p_M, top_k_M, min_p_M, recorded)
    given = hidden_MH, head.weight, head.bias, targets_M, temperature_M, cut, logit_bias, candidates, plan
    found: tuple[Tensor, ...] = FusedHead.apply(*given)  # pyright: ignore[reportAssignmentType]
    return found if candidates is not None else found[:2]


def token_logprobs(
    hidden_MH: Tensor,
    targets_M: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    temperature_M: Tensor,
    top_p_M: Tensor | None = None,
    top_k_M: Tensor | None = None,
    min_p_M: Tensor | None = None,
    recorded: Recorded | None = None,
    candidates: Recorded | None = None,
    logit_bias: LogitBias | None = None,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, ...]:
    """What `linear_logprobs` computes, under any head; with more than one chunk the backward pass runs the head again.

    Args:
        hidden_MH: [M, H] states that predict the targets.
        targets_M: [M] int64 token ids.
        head: [C, H] to [C, V] logits.
        vocab_size: V.
        temperature_M: [M] float32 above 0.
        top_p_M: [M] float32, 1.0 = off; None = all off.
        top_k_M: [M] int64, -1 = off; None = all off.
        min_p_M: [M] float32, 0.0 = off; None = all off.
        recorded: all that could be drawn, in place of what these three leave; None: nothing is said.
        candidates: tokens whose log-probs are wanted beside the targets'; None: there are none.
        logit_bias: added before the temperature; None: nothing.
        entropy_gradient: whether the entropies carry a gradient.
        chunk_elements: bound of C * V.

    Returns:
        As `linear_logprobs`.
    """
    cut = _cut(targets_M, top_p_M, top_k_M, min_p_M, recorded)

    def chunk(hidden: Tensor, part: slice) -> tuple[Tensor, ...]:
        logits = head(hidden)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if logit_bias is not None:
            wide = logit_bias.rows(part).added(wide)
        scaled = wide / temperature_M[part, None].to(wide.dtype)
        here = None if candidates is None else candidates.rows(part)
        return _chunk_logprobs(scaled, targets_M[part], None if cut is None else cut.rows(part), here, entropy_gradient)

    size = max(1, chunk_elements // vocab_size)
    if len(targets_M) <= size:
        return chunk(hidden_MH, slice(None))
    parts: list[tuple[Tensor, ...]] = []
    for first in range(0, len(targets_M), size):
        part = slice(first, first + size)
        parts.append(checkpoint(chunk, hidden_MH[part], part, use_reentrant=False))
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _cut(
    targets_M: Tensor, top_p_M: Tensor | None, top_k_M: Tensor | None, min_p_M: Tensor | None, recorded: Recorded | None
) -> Cut | None:
    if top_p_M is None and top_k_M is None and min_p_M is None and recorded is None:
        return None
    top_p = torch.ones_like(targets_M, dtype=torch.float32) if top_p_M is None else top_p_M
    return Cut(top_p, torch.full_like(targets_M, -1) if top_k_M is None else top_k_M, min_p_M, recorded)


def _chunk_logprobs(
    logits_MV: Tensor, targets_M: Tensor, cut: Cut | None, candidates: Recorded | None, entropy_gradient: bool
) -> tuple[Tensor, ...]:
    finite = logits_MV
    if cut is not None:
        with torch.no_grad():
            dropped = ~cut.support(logits_MV, targets_M)
        finite = logits_MV.masked_fill(dropped, 0.0)
        logits_MV = logits_MV.masked_fill(dropped, -torch.inf)
    normalizer = logits_MV.logsumexp(-1)
    logprobs = logits_MV.gather(-1, targets_M[:, None])[:, 0] - normalizer
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probs = (logits_MV - normalizer[:, None]).exp()
        entropy = normalizer - (probs * finite).sum(-1)
    if candidates is None:
        return logprobs, entropy
    return logprobs, entropy, (candidates.of(logits_MV) - normalizer[candidates.token]).detach()
