"""Log-probs and entropies of chosen tokens from hidden states, a bounded number of logits at a time.

Letters: `M` predicted tokens, `H` hidden size, `V` vocabulary, `C` tokens of a chunk. The logits of a chunk are float32
[C, V] with C * V bounded, and with more than one chunk the backward pass computes them again instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 25
"""Logits in memory at a time: 128 MiB of float32."""
GPU_CHUNK_ELEMENTS = 1 << 27
"""On a GPU: 512 MiB, and some 3 GiB with what is derived from them; 883 tokens of a vocabulary of 151,936."""


def token_logprobs(
    hidden_MH: Tensor,
    targets_M: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    temperature_M: Tensor,
    top_p_M: Tensor | None = None,
    top_k_M: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Log pi(target | state) = logit_target / tau - logsumexp(logits / tau), over the kept tokens where truncated.

    Args:
        hidden_MH: [M, H] states that predict the targets.
        targets_M: [M] int64 token ids.
        head: [C, H] to [C, V] logits.
        vocab_size: V.
        temperature_M: [M] float32 above 0.
        top_p_M: [M] float32, 1.0 = off; None = all off.
        top_k_M: [M] int64, -1 = off; None = all off.
        chunk_elements: bound of C * V.

    Returns:
        [M] float32 log-probs, which carry the gradient, and [M] float32 entropies in nats, which do not.
    """

    def chunk(hidden: Tensor, targets: Tensor, temperature: Tensor, top_p: Tensor | None, top_k: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return _chunk_logprobs(wide / temperature[:, None].to(wide.dtype), targets, top_p, top_k)

    size = max(1, chunk_elements // vocab_size)
    if len(targets_M) <= size:
        return chunk(hidden_MH, targets_M, temperature_M, top_p_M, top_k_M)
    parts: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(targets_M), size):
        part = slice(first, first + size)
        top_p = None if top_p_M is None else top_p_M[part]
        top_k = None if top_k_M is None else top_k_M[part]
        parts.append(checkpoint(chunk, hidden_MH[part], targets_M[part], temperature_M[part], top_p, top_k, use_reentrant=False))
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def support(logits_MV: Tensor, targets_M: Tensor, top_p_M: Tensor, top_k_M: Tensor) -> Tensor:
    """Tokens that top-k and top-p leave: [M, V] bool.

    Tokens are ranked by probability, ties by id. Rank >= k goes, and so does a token before which the probability p has
    been reached already (both measured on the whole distribution). The target always stays: the sampler did draw it,
    and under newer weights it may rank lower than it did.
    """
    probs = logits_MV.softmax(-1)
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    before = _cumulative(ranked) - ranked
    rank = torch.arange(logits_MV.shape[-1], device=logits_MV.device)[None, :]
    limit = torch.where(top_k_M < 0, logits_MV.shape[-1], top_k_M)[:, None]
    off = (top_p_M >= 1.0)[:, None]
    kept = (rank < limit) & (off | (before < top_p_M[:, None]))
    mask = torch.zeros_like(kept).scatter(-1, order, kept)
    return mask.scatter(-1, targets_M[:, None], True)


def _cumulative(probs: Tensor) -> Tensor:
    """Cumulative sums over the last dimension; where torch's own kernel is not reproducible, and must be, in fixed point."""
    if not (probs.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return probs.cumsum(-1)
    return _fixed_point_cumsum(probs)


def _fixed_point_cumsum(probs: Tensor) -> Tensor:
    scale = float(1 << 52)
    return ((probs.double() * scale).round().long().cumsum(-1).double() / scale).to(probs.dtype)


def _chunk_logprobs(logits_MV: Tensor, targets_M: Tensor, top_p_M: Tensor | None, top_k_M: Tensor | None) -> tuple[Tensor, Tensor]:
    if top_p_M is not None and top_k_M is not None:
        with torch.no_grad():
            kept = support(logits_MV, targets_M, top_p_M, top_k_M)
        logits_MV = logits_MV.masked_fill(~kept, float("-inf"))
    normalizer = logits_MV.logsumexp(-1)
    logprobs = logits_MV.gather(-1, targets_M[:, None])[:, 0] - normalizer
    with torch.no_grad():
        probs = (logits_MV - normalizer[:, None]).exp()
        entropy = normalizer - (probs * logits_MV.masked_fill(probs == 0, 0.0)).sum(-1)
    return logprobs, entropy
