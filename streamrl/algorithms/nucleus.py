"""Which tokens top-k, top-p and min-p leave, and that knowledge at one bit a token.

Letters: `M` predicted tokens, `V` vocabulary, `B` bytes of V bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 8
"""Tokens whose bits share a byte of `packed`."""


def support(logits_MV: Tensor, targets_M: Tensor, top_p_M: Tensor, top_k_M: Tensor, min_p_M: Tensor | None = None) -> Tensor:
    """Tokens that top-k, top-p and min-p leave: [M, V] bool.

    Tokens are ranked by logit, ties by id. Rank >= k goes, and so does a token before which the probability p has
    been reached already (nucleus sampling, arXiv 1904.09751), and one that is less than min_p times as likely as the first (arXiv
    2407.01082); each is measured on the whole distribution. The first always stays. So does the target: the sampler did draw it, and
    under newer weights it may rank lower than it did.

    Args:
        logits_MV: [M, V] float32 or float64 of the distribution that is truncated, divided by the temperature.
        targets_M: [M] int64 token ids.
        top_p_M: [M] float32 above 0; 1.0 = off.
        top_k_M: [M] int64 of at least 1; -1 = off.
        min_p_M: [M] float32 in [0, 1]; 0.0 = off; None = all off.
    """
    ranked, order = logits_MV.sort(dim=-1, descending=True, stable=True)
    probs = ranked.softmax(-1)
    before = _cumulative(probs) - probs
    rank = torch.arange(logits_MV.shape[-1], device=logits_MV.device)[None, :]
    limit = torch.where(top_k_M < 0, logits_MV.shape[-1], top_k_M)[:, None]
    off = (top_p_M >= 1.0)[:, None]
    kept = (rank < limit) & (off | (before < top_p_M[:, None]))
    if min_p_M is not None:
        kept &= probs >= min_p_M[:, None] * probs[:, :1]
    mask = torch.zeros_like(kept).scatter(-1, order, kept)
    return mask.scatter(-1, targets_M[:, None], True)


def packed(kept_MV: Tensor) -> Tensor:
    """[M, B] uint8 with B = ceil(V / 8): bit i of byte b is token 8 b + i, and what is beyond V is 0."""
    tokens, vocab = kept_MV.shape
    padded = torch.nn.functional.pad(kept_MV, (0, -vocab % BITS)).view(tokens, -1, BITS)
    return (padded * _places(kept_MV.device)).sum(-1, dtype=torch.uint8)


def unpacked(bytes_MB: Tensor, vocab: int) -> Tensor:
    """The first `vocab` columns of what `packed` was given: [M, vocab] bool."""
    return (bytes_MB[..., None] & _places(bytes_MB.device)).ne(0).flatten(1)[:, :vocab]


def _places(device: torch.device) -> Tensor:
    return 1 << torch.arange(BITS, dtype=torch.uint8, device=device)


def _cumulative(probs: Tensor) -> Tensor:
    """Cumulative sums over the last dimension; where torch's own kernel is not reproducible, and must be, in fixed point."""
    if not (probs.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return probs.cumsum(-1)
    return fixed_point_cumsum(probs)


def fixed_point_cumsum(probs: Tensor) -> Tensor:
    """Cumulative sums over the last dimension in units of 2^-52, whose order of addition does not matter.

    Args:
        probs: [M, V] of at most 1 each, with sums of at most 2^11.
    """
    scale = float(1 << 52)
    return ((probs.double() * scale).round().long().cumsum(-1).double() / scale).to(probs.dtype)
