"""The output head by chunks of one fixed length, made to be compiled: the same shapes every time, whatever a row holds.

What `streamrl.algorithms.fused_head` computes without truncation, where elementwise work counts. There chunks of the backward pass are
blocks of the vocabulary over all tokens, so that every number of tokens is another shape. Here both passes go through the same chunks of
tokens, the last one padded, and the weight's gradient is added up in float32. Letters as there: `M` predicted tokens, `H` hidden size,
`V` vocabulary, `C` tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from streamrl.algorithms.fused_head import Plan, accumulation_dtype, product, scaled_logits, statistics
from streamrl.algorithms.logprobs import LinearHead

CHUNK_TOKENS = 4096
"""Most tokens of a chunk: enough for the matrix products."""
KEPT_BYTES = 5 << 30
"""Most that the probabilities of a row's tokens may take until the backward pass, in the states' type; else they are computed again."""
CHUNK_LOGITS = 1 << 30
"""Most logits of a chunk: 4 GiB of float32, of which a compiled backward pass keeps less than twice as much at a time."""


class ChunkKernels(NamedTuple):
    """The two functions that do the work on a chunk, and its length."""

    tokens: int
    statistics: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
    """`chunk_statistics`, compiled or not."""
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    """`chunk_gradients`, likewise."""


def chunk_kernels(vocab_size: int, *, compiled: bool) -> ChunkKernels:
    """For a vocabulary; the same kernels serve a whole run."""
    tokens = min(CHUNK_TOKENS, 1 << (max(1, CHUNK_LOGITS // vocab_size).bit_length() - 1))
    if not compiled:
        return ChunkKernels(tokens, chunk_statistics, chunk_gradients)
    return ChunkKernels(tokens, torch.compile(chunk_statistics, dynamic=False), torch.compile(chunk_gradients, dynamic=False))


def chunked_logprobs(
    hidden_MH: Tensor,
    targets_M: Tensor,
    head: LinearHead,
    *,
    temperature_M: Tensor,
    kernels: ChunkKernels,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """What `streamrl.algorithms.logprobs.linear_logprobs` computes over the whole vocabulary; no more than a chunk's logits are kept.

    Args:
        hidden_MH: [M, H] states that predict the targets.
        targets_M: [M] int64 token ids.
        head: weight and bias of the states' type.
        temperature_M: [M] above 0.
        kernels: see `chunk_kernels`.
        entropy_gradient: whether the entropies carry a gradient.

    Returns:
        [M] log-probs, which carry the gradient, and [M] entropies in nats; float32, of float64 states float64.
    """
    plan = Plan(0, head.scale, head.softcap, entropy_gradient, torch.is_grad_enabled())
    found: tuple[Tensor, Tensor] = ChunkedHead.apply(hidden_MH, head.weight, head.bias, targets_M, temperature_M, plan, kernels)  # pyright: ignore[reportAssignmentType]
    return found


class ChunkedHead(torch.autograd.Function):
    """(hidden [M, H], weight [V, H], bias [V] | None, targets [M], temperature [M], plan, kernels) to (log-probs [M], entropies [M])."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        temperature_M: Tensor,
        plan: Plan,
        kernels: ChunkKernels,
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        temperature_M = temperature_M.to(accumulation_dtype(hidden_MH))
        found = temperature_M.new_zeros((3, len(hidden_MH)))
        keep = keeps_probabilities(len(hidden_MH), len(weight_VH), hidden_MH.element_size(), plan)
        kept: list[Tensor] = []
        for first in range(0, len(hidden_MH), kernels.tokens):
            part = slice(first, first + kernels.tokens)
            hidden, targets, temperature = _chunk(kernels.tokens, hidden_MH[part], targets_M[part], temperature_M[part])
            *numbers, q = kernels.statistics(hidden, weight_VH, bias_V, targets, temperature, plan, keep)
            for row, values in zip(found, numbers, strict=True):
                row[part] = values[: len(row[part])]
            if q is not None:
                kept.append(q)
        logprobs, entropy, normalizer = found.unbind()
        if plan.remember:
            ctx.save_for_backward(hidden_MH, weight_VH, bias_V, targets_M, temperature_M, normalizer, entropy.clone(), *kept)
            ctx.plan, ctx.kernels = plan, kernels
        logprobs, entropy = logprobs.clone(), entropy.clone()
        if not plan.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of hidden, weight and bias. What tokens hold whose slopes are 0, NaN included, reaches nothing."""
        plan, kernels = ctx.plan, ctx.kernels
        hidden_MH, weight, bias, *saved = ctx.saved_tensors
        of_tokens, kept = saved[:4], saved[4:]
        wide = of_tokens[1].dtype
        logprob_slopes, entropy_slopes = grad_outputs
        if not plan.entropy_gradient:
            entropy_slopes = torch.zeros_like(logprob_slopes)
        hidden_slopes = torch.zeros_like(hidden_MH)
        weight_slopes = torch.zeros_like(weight, dtype=wide)
        bias_slopes = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for first in range(0, len(hidden_MH), kernels.tokens):
            part = slice(first, first + kernels.tokens)
            rows = (values[part] for values in (hidden_MH, *of_tokens, logprob_slopes, entropy_slopes))
            hidden, *others = _chunk(kernels.tokens, *rows)
            q = kept[first // kernels.tokens] if kept else None
            of_hidden, of_weight, of_bias = kernels.gradients(hidden, weight, bias, *others, q, plan)
            hidden_slopes[part] = of_hidden[: len(hidden_MH[part])]
            weight_slopes += of_weight
            if bias_slopes is not None:
                bias_slopes += of_bias
        bias_slopes = bias_slopes.to(bias.dtype) if bias is not None and bias_slopes is not None else None
        return hidden_slopes, weight_slopes.to(weight.dtype), bias_slopes, None, None, None, None


def keeps_probabilities(tokens: int, vocab: int, itemsize: int, plan: Plan) -> bool:
    """Whether a forward pass keeps the softmax for the backward pass, which then needs no logits.

    The gradients of an entropy and of capped logits need the logits themselves. In bfloat16 q is rounded as its slopes are anyway.
    """
    return plan.remember and not plan.entropy_gradient and not plan.softcap and tokens * vocab * itemsize <= KEPT_BYTES


def chunk_statistics(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_C: Tensor, temperature_C: Tensor, plan: Plan, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """[C] each: log-prob of the target, entropy, logsumexp of the scaled logits; with `keep` their softmax [C, V] in the states' type."""
    logits = scaled_logits(hidden_CH, weight_VH, bias_V, temperature_C, plan)
    greatest, total, moment, chosen = statistics(logits, targets_C, None)
    normalizer = greatest + total.log()
    q = (logits - normalizer[:, None]).exp().to(hidden_CH.dtype) if keep else None
    return chosen - normalizer, total.log() - moment / total, normalizer, q


def chunk_gradients(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_C: Tensor,
    temperature_C: Tensor,
    normalizer_C: Tensor,
    entropy_C: Tensor,
    logprob_slopes_C: Tensor,
    entropy_slopes_C: Tensor,
    q_CV: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss's gradient with respect to hidden [C, H], weight [V, H] and bias [V], from those of log-probs and entropies.

    With z the scaled logits, q their softmax and S its entropy: d log q_t / dz_j = [j = t] - q_j and dS / dz_j = -q_j (log q_j + S).
    Written so that a compiler makes one pass over the logits of it; over q where the forward pass has kept it.
    """
    active = ((logprob_slopes_C != 0) | (entropy_slopes_C != 0))[:, None]
    if q_CV is None:
        logits = scaled_logits(hidden_CH, weight_VH, bias_V, temperature_C, plan)
        q = (logits - normalizer_C[:, None]).exp()
    else:
        logits, q = None, q_CV.to(temperature_C.dtype)
    here = torch.arange(q.shape[1], device=q.device)[None] == targets_C[:, None]
    slopes = (here.to(q.dtype) - q) * logprob_slopes_C[:, None]
    if plan.entropy_gradient and logits is not None:
        slopes = slopes - q * (logits - normalizer_C[:, None] + entropy_C[:, None]) * entropy_slopes_C[:, None]
    slopes = slopes * (plan.scale / temperature_C)[:, None]
    if plan.softcap and logits is not None:
        slopes = slopes * (1 - (logits * (temperature_C / plan.softcap)[:, None]).square())
    slopes = slopes.masked_fill(~active, 0.0)
    bias_slopes = None if bias_V is None else slopes.sum(0)
    if slopes.is_cuda:
        slopes = slopes.to(hidden_CH.dtype)
    wide = temperature_C.dtype
    return product(slopes, weight_VH, wide), product(slopes.T, hidden_CH.masked_fill(~active, 0.0), wide), bias_slopes


def _chunk(length: int, hidden: Tensor, *rows: Tensor) -> list[Tensor]:
    """Tensors of a chunk as long as all chunks: what is padded has slopes of 0 and a temperature above it."""
    missing = length - len(hidden)
    if not missing:
        return [hidden, *rows]
    targets, temperature, *others = rows
    padded = [pad(hidden, (0, 0, 0, missing)), pad(targets, (0, missing)), pad(temperature, (0, missing), value=1.0)]
    return [*padded, *(pad(values, (0, missing)) for values in others)]
