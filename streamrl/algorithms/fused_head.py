"""Output head and log-softmax as one differentiable function that never holds all logits.

Letters: `M` predicted tokens, `H` hidden size, `V` vocabulary (of this rank where it is split over ranks), `C` tokens of a chunk,
`D` columns of a block, `B` bytes that hold V bits. The forward pass goes through chunks of tokens and sees [C, V] logits at a time:
truncation needs whole distributions. The backward pass computes logits again in blocks of the vocabulary, [M, D] at a time: a block's
part of the weight's gradient is then one product over all tokens, summed in float32 and never added to, and only the hidden states'
gradients [M, H] are accumulated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from streamrl.algorithms.logit_bias import LogitBias
from streamrl.algorithms.nucleus import BITS, packed, support, unpacked
from streamrl.algorithms.recorded import Recorded


class Plan(NamedTuple):
    """How to go about it."""

    chunk_elements: int
    """Bound of C * V and of M * D, whatever one token or eight columns need."""
    scale: float = 1.0
    softcap: float = 0.0
    entropy_gradient: bool = False
    remember: bool = True
    """Whether a backward pass may follow."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other parts of the vocabulary."""


class Cut(NamedTuple):
    """What a distribution is restricted to, see `streamrl.algorithms.nucleus.support`."""

    top_p_M: Tensor
    top_k_M: Tensor
    min_p_M: Tensor | None = None
    recorded: Recorded | None = None
    """What was left when the tokens were drawn; where it is said, that counts, whatever these logits would leave."""

    def rows(self, chosen: slice) -> Cut:
        """Of some of the predicted tokens."""
        min_p = None if self.min_p_M is None else self.min_p_M[chosen]
        return Cut(self.top_p_M[chosen], self.top_k_M[chosen], min_p, None if self.recorded is None else self.recorded.rows(chosen))

    def support(self, logits_MV: Tensor, targets_M: Tensor) -> Tensor:
        """[M, V] bool: the tokens that are kept."""
        recorded = self.recorded
        if recorded is None:
            return support(logits_MV, targets_M, self.top_p_M, self.top_k_M, self.min_p_M)
        kept = recorded.support(logits_MV.shape[-1])
        if not recorded.complete:
            own = support(logits_MV, targets_M, self.top_p_M, self.top_k_M, self.min_p_M)
            kept = torch.where(recorded.said[:, None], kept, own)
        return kept


class FusedHead(torch.autograd.Function):
    """(hidden [M, H], weight [V, H], bias [V] | None, targets [M], temperature [M], cut, logit bias | None, candidates | None, plan) to
    (log-probs [M], entropies [M], log-probs [S] of the candidates, which carry no gradient).
    See `streamrl.algorithms.logprobs.linear_logprobs`; targets outside [0, V) are another rank's.

    With logits z = (cap(scale (W h + b)) + logit bias) / temperature, q = softmax(z) over the kept tokens and its entropy S:
    d log q_t / dz_j = [j = t] - q_j and dS / dz_j = -q_j (log q_j + S).
    """  # noqa: D205

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        temperature_M: Tensor,
        cut: Cut | None,
        logit_bias: LogitBias | None,
        candidates: Recorded | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the class."""
        tokens, vocab = len(hidden_MH), len(weight_VH)
        temperature_M = temperature_M.to(accumulation_dtype(hidden_MH))
        found = temperature_M.new_zeros((4, tokens))
        bits = targets_M.new_empty((tokens, -(-vocab // BITS)), dtype=torch.uint8) if cut is not None and plan.remember else None
        size = max(1, plan.chunk_elements // vocab)
        logits, likely = None, [found.new_zeros(0)]
        for first in range(0, tokens, size):
            part = slice(first, first + size)
            added = None if logit_bias is None else logit_bias.rows(part)
            logits = scaled_logits(hidden_MH[part], weight_VH, bias_V, temperature_M[part], plan, added)
            kept = None if cut is None else cut.rows(part).support(logits, targets_M[part])
            if kept is not None and bits is not None:
                bits[part] = packed(kept)
            if candidates is not None:
                likely.append(candidates.rows(part).of(logits))
            for row, values in zip(found, statistics(logits, targets_M[part], kept), strict=True):
                row[part] = values
        greatest, total, moment, chosen = found if plan.group is None else _combined(found, plan.group)
        logprobs = chosen - greatest - total.log()
        entropy = total.log() - moment / total
        if plan.remember:
            only = logits if tokens <= size else None
            ctx.save_for_backward(
                hidden_MH, weight_VH, bias_V, targets_M, temperature_M, greatest + total.log(), entropy.clone(), bits, only
            )
            ctx.plan, ctx.logit_bias = plan, logit_bias
        known = torch.cat(likely)
        if candidates is not None:
            known -= (greatest + total.log())[candidates.token]
        ctx.mark_non_differentiable(known, *(() if plan.entropy_gradient else (entropy,)))
        return logprobs, entropy, known

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of hidden, weight and bias. Tokens whose slopes are 0 take no part: what they hold, NaN included, reaches nothing."""
        plan: Plan = ctx.plan
        added: LogitBias | None = ctx.logit_bias
        logprob_slopes_M, entropy_slopes_M, _ = grad_outputs
        hidden, weight, bias, targets, temperature, normalizer, entropy, bits, logits = ctx.saved_tensors
        shape, vocab = hidden.shape, len(weight)
        rows = None
        active = logprob_slopes_M != 0
        if plan.entropy_gradient:
            active |= entropy_slopes_M != 0
        if not bool(active.all()):
            rows = active.nonzero()[:, 0]
            hidden, targets, temperature, normalizer, entropy = (x[rows] for x in (hidden, targets, temperature, normalizer, entropy))
            logprob_slopes_M, entropy_slopes_M = logprob_slopes_M[rows], entropy_slopes_M[rows]
            bits, logits = (None if x is None else x[rows] for x in (bits, logits))
            added = None if added is None else added.rows(rows)
        wide = temperature.dtype
        hidden_slopes = None if len(hidden) or not ctx.needs_input_grad[0] else hidden.new_zeros(hidden.shape, dtype=wide)
        weight_slopes = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        bias_slopes = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        width = max(BITS, plan.chunk_elements // max(1, len(hidden)) // BITS * BITS) if logits is None else vocab
        for first in range(0, vocab if len(hidden) else 0, width):
            columns = slice(first, min(first + width, vocab))
            part = None if bias is None else bias[columns]
            inside = None if added is None else added.columns(columns.start, columns.stop)
            block = scaled_logits(hidden, weight[columns], part, temperature, plan, inside) if logits is None else logits
            kept = None if bits is None else unpacked(bits[:, first // BITS : -(-columns.stop // BITS)], columns.stop - first)
            spread = entropy_slopes_M if plan.entropy_gradient else None
            slopes = logit_slopes(block, targets - first, kept, normalizer, entropy, logprob_slopes_M, spread, temperature, plan, inside)
            if bias_slopes is not None:
                bias_slopes[columns] = slopes.sum(0)
            if slopes.is_cuda:
                slopes = slopes.to(hidden.dtype)
            if ctx.needs_input_grad[0]:
                share = product(slopes, weight[columns], wide)
                hidden_slopes = share if hidden_slopes is None else hidden_slopes.add_(share)
            if weight_slopes is not None:
                weight_slopes[columns] = product(slopes.T, hidden, wide)
        if hidden_slopes is not None:
            if rows is not None:
                hidden_slopes = hidden_slopes.new_zeros(shape).index_copy_(0, rows, hidden_slopes)
            if plan.group is not None:
                dist.all_reduce(hidden_slopes, group=plan.group)
            hidden_slopes = hidden_slopes.to(hidden.dtype)
        return hidden_slopes, weight_slopes, bias_slopes, *(None,) * 6


def accumulation_dtype(values: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`left @ right` with sums and result in `dtype`, from factors of the same or a narrower type."""
    if left.dtype == right.dtype == dtype:
        return left @ right
    if left.is_cuda and left.dtype == right.dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def scaled_logits(
    hidden_MH: Tensor,
    weight_DH: Tensor,
    bias_D: Tensor | None,
    temperature_M: Tensor,
    plan: Plan,
    logit_bias: LogitBias | None = None,
) -> Tensor:
    """(cap(scale (h W^T + b)) + logit bias) / temperature, cap(x) = softcap tanh(x / softcap): [M, D] in the temperature's type."""
    logits = product(hidden_MH, weight_DH.T, temperature_M.dtype)
    if bias_D is not None:
        logits += bias_D
    if plan.scale != 1.0:
        logits *= plan.scale
    if plan.softcap:
        logits.div_(plan.softcap).tanh_().mul_(plan.softcap)
    if logit_bias is not None:
        logit_bias.add_(logits)
    return logits.div_(temperature_M[:, None])


def statistics(logits_CV: Tensor, targets_C: Tensor, kept_CV: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[C] each: maximum m of the kept logits z, sum of exp(z - m), sum of exp(z - m) (z - m), and the target's z or 0 if it is not here."""
    vocab = logits_CV.shape[-1]
    here = (targets_C >= 0) & (targets_C < vocab)
    chosen = logits_CV.gather(-1, targets_C.clamp(0, vocab - 1)[:, None])[:, 0].masked_fill(~here, 0.0)
    if kept_CV is not None:
        logits_CV = logits_CV.masked_fill(~kept_CV, -torch.inf)
    greatest = logits_CV.amax(-1)
    below = logits_CV - greatest[:, None]
    shares = below.exp()
    total = shares.sum(-1)
    if kept_CV is not None:
        below.masked_fill_(~kept_CV, 0.0)
    return greatest, total, below.mul_(shares).sum(-1), chosen


def logit_slopes(
    logits_MD: Tensor,
    targets_M: Tensor,
    kept_MD: Tensor | None,
    normalizer_M: Tensor,
    entropy_M: Tensor,
    logprob_slopes_M: Tensor,
    entropy_slopes_M: Tensor | None,
    temperature_M: Tensor,
    plan: Plan,
    logit_bias: LogitBias | None = None,
) -> Tensor:
    """The loss's gradient with respect to h W^T + b, [M, D], from those with respect to log-probs and entropies."""
    inner_M = plan.scale / temperature_M
    logprob_slopes_M = logprob_slopes_M * inner_M
    probs = (logits_MD - normalizer_M[:, None]).exp_()
    if kept_MD is not None:
        probs.masked_fill_(~kept_MD, 0.0)
    if entropy_slopes_M is None:
        slopes = probs.mul_(-logprob_slopes_M[:, None])
    else:
        entropy_slopes_M = entropy_slopes_M * inner_M
        slopes = torch.special.entr(probs).mul_(entropy_slopes_M[:, None])
        slopes -= probs.mul_((logprob_slopes_M + entropy_slopes_M * entropy_M)[:, None])
    here = (targets_M >= 0) & (targets_M < slopes.shape[1])
    cell = torch.arange(len(slopes), device=slopes.device), targets_M.clamp(0, slopes.shape[1] - 1)
    slopes[cell] += torch.where(here, logprob_slopes_M, 0.0)
    if plan.softcap:
        capped = logits_MD * (temperature_M / plan.softcap)[:, None]
        if logit_bias is not None:
            logit_bias.add_(capped, -1 / plan.softcap)
        slopes *= 1 - capped.square_()
    return slopes


def _combined(found: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`statistics` of the whole vocabulary from those of its parts, [4, M]: one maximum and one sum over the ranks."""
    greatest, total, moment, chosen = found
    overall = greatest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
    down = greatest - overall
    sums = torch.stack([total * down.exp(), (moment + total * down) * down.exp(), chosen])
    dist.all_reduce(sums, group=group)
    return torch.cat([overall[None], sums])
