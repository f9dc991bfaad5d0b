"""Log-probs under an output head whose vocabulary is split over ranks (tensor parallelism).

Every rank holds V / R consecutive rows of the head and the same hidden states. Two reductions of [M] numbers make the full
distribution's maximum, sum, moment and target logit of the ranks' own; no logits travel, forward or backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.algorithms.fused_head import FusedHead, Plan
from streamrl.algorithms.logit_bias import LogitBias
from streamrl.algorithms.logprobs import CHUNK_ELEMENTS, LinearHead


def vocab_parallel_logprobs(
    hidden_MH: Tensor,
    targets_M: Tensor,
    head: LinearHead,
    *,
    first: int,
    group: dist.ProcessGroup,
    temperature_M: Tensor,
    logit_bias: LogitBias | None = None,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """`streamrl.algorithms.logprobs.linear_logprobs` over a split vocabulary, without truncation: that ranks whole distributions.

    Collective, forward and (where hidden states have a gradient) backward. Every rank must give the results the same slopes, as it does
    where all compute the same loss. Each then has its own rows' gradient of the head, and the hidden states' full one, summed over ranks.

    Args:
        hidden_MH: [M, H] states that predict the targets, equal on all ranks.
        targets_M: [M] int64 token ids of the whole vocabulary, equal on all ranks.
        head: this rank's rows of weight and bias.
        first: token id of this rank's first row.
        group: the ranks whose parts make the vocabulary.
        temperature_M: [M] above 0.
        logit_bias: of the whole vocabulary, equal on all ranks; None: nothing.
        entropy_gradient: whether the entropies carry a gradient.
        chunk_elements: bound of the logits in memory at a time.

    Returns:
        [M] log-probs and [M] entropies in nats of the whole distribution, equal on all ranks; float32, of float64 states float64.
    """
    remember = torch.is_grad_enabled()
    plan = Plan(chunk_elements, head.scale, head.softcap, entropy_gradient, remember, group)
    added = None if logit_bias is None else logit_bias.columns(first, first + len(head.weight))
    given = hidden_MH, head.weight, head.bias, targets_M - first, temperature_M, None, added, None, plan
    logprobs, entropy, _ = FusedHead.apply(*given)  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs, entropy
