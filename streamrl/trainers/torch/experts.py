"""Mixtures of experts, dropless: every token meets the experts that its router chose, whatever the others of its row chose.

Letters: `T` tokens of a row, `E` experts, `k` that a token meets, `S = T k` pairs of both, `H` hidden size, `I` inner size of an expert.

Pairs are sorted by expert, so that an expert's tokens follow each other, and go through two grouped products:

```text
chosen [T = 3, k = 2]   0 2 | 2 1 | 0 1       pair p is of token p // k
order [S]               0 4 3 5 1 2           pairs by expert: 0 0 | 1 1 | 2 2, among equals as they stand
ends [E]                2 4 6                 pairs of expert e are order[ends[e - 1] : ends[e]]
places [S]              0 4 5 2 1 3           its inverse: pair p stands at row places[p]
```
Both ways are gathers, forward and backward, with no sum by atomic additions: equal inputs give equal bits, also on a GPU. On a GPU in
bfloat16 the products are torch's grouped ones, elsewhere a product an expert. transformers calls it by the name `EXPERTS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EXPERTS = "streamrl_grouped"


def register() -> None:
    """Make `EXPERTS` known to transformers, as a value of `experts_implementation`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, grouped_experts)


def grouped_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the chosen experts make of each token, summed with the router's weights.

    The weights multiply what goes into the second product, which is I wide, not what comes out of it, which is H wide.

    Args:
        module: experts of transformers: `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]. Where they are laid out in another way, or
            have biases, transformers' own way is gone.
        hidden_states: [T, H].
        top_k_index: [T, k] int64.
        top_k_weights: [T, k].

    Returns:
        [T, H], of the type of `hidden_states`.
    """
    if module.is_transposed or module.has_bias or not module.has_gate or getattr(module, "has_post_expert_norm", False):
        from transformers.integrations.moe import grouped_mm_experts_forward

        own: Any = grouped_mm_experts_forward if hidden_states.is_cuda else type(module).forward.__wrapped__
        found: Tensor = own(module, hidden_states, top_k_index, top_k_weights)
        return found
    order, places, ends = by_expert(top_k_index.flatten(), module.num_experts)
    weights = permute(top_k_weights.reshape(-1, 1), order, places, 1)
    inner = module._apply_gate(products(permute(hidden_states, order, places, top_k_index.shape[1]), module.gate_up_proj, ends))
    outer = products((inner * weights).to(hidden_states.dtype), module.down_proj, ends)
    return sums(outer, order, places, top_k_index.shape[1])


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find order [S], places [S] and ends [E] int32 of pairs whose experts are `chosen` [S]; see above.

    Pairs whose number is `experts` are of none of them, and stand behind all others: cut off there, `order` is of the others alone.
    """
    ordered, order = torch.sort(chosen, stable=True)
    numbers = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)), ends


def added(rows: Tensor, places: Tensor, k: int) -> Tensor:
    """[T, N]: for each token the sum of the rows [S, N] of its pairs, which stand at `places` [T k]; one at S or behind it has no row."""
    whole = len(rows) == len(places)
    if k == 1 and whole:
        return rows[places]
    if not len(rows):
        return rows.new_zeros(len(places) // k, rows.shape[1])
    if torch.compiler.is_compiling():  # one pass over the rows; as a reduction it takes six
        return _unrolled(rows, places.view(-1, k), whole=whole)
    found = rows[places] if whole else rows[places.clamp(max=len(rows) - 1)].masked_fill_((places >= len(rows))[:, None], 0)
    return found.view(-1, k, rows.shape[1]).sum(1)


def _unrolled(rows: Tensor, places: Tensor, *, whole: bool) -> Tensor:
    """`added`, of places [T, k]."""
    total: Any = 0
    for place in places.unbind(1):
        found = rows[place] if whole else rows[place.clamp(max=len(rows) - 1)].masked_fill((place >= len(rows))[:, None], 0)
        total = total + (found if found.dtype == torch.float64 else found.float())
    return total.to(rows.dtype)


class _Permute(torch.autograd.Function):
    """Row `order[s] // k` of [T, N] for each of S pairs; the gradient of a token is the sum of its pairs'."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.k = k
        return values[order // k]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = grad_outputs
        _, places = ctx.saved_tensors
        return added(slopes, places, ctx.k), None, None, None


class _Sums(torch.autograd.Function):
    """The transposed map: for each of T tokens the sum of the rows of its pairs, which stand at `places`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.k = k
        return added(values, places, k)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = grad_outputs
        order, _ = ctx.saved_tensors
        return slopes[order // ctx.k], None, None, None


permute: Any = _Permute.apply
"""(values [T, N], order [S], places [T k], k) to [S, N]; S is T k, or less where some pairs are of no expert here."""
sums: Any = _Sums.apply
"""(values [S, N], order [S], places [T k], k) to [T, N]."""


def products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[S, out] = each row times its expert's [out, in] of `weight` [E, out, in]; rows stand by expert, those of e end at `ends[e]`."""
    if len(rows) and _grouped(rows.is_cuda, rows.dtype, weight.shape[1], weight.shape[2]):
        return _GROUPED(rows, weight.transpose(1, 2), offs=ends)
    found: Tensor = _one_by_one(rows, weight, ends)
    return found


@torch.compiler.assume_constant_result  # type: ignore[no-untyped-call]
def _grouped(cuda: bool, dtype: torch.dtype, height: int, width: int) -> bool:
    """Whether torch's grouped products can be used: in bfloat16, rows of 16 bytes, and before torch 2.10 on Hopper alone."""
    if not cuda or dtype != torch.bfloat16 or height % 8 or width % 8:
        return False
    return torch.cuda.get_device_capability() >= ((8, 0) if hasattr(torch.nn.functional, "grouped_mm") else (9, 0))


def _each_expert(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    bounds = ends.diff(prepend=ends.new_zeros(1)).tolist()
    found = [part @ one.T for part, one in zip(rows.split(bounds), weight.unbind(), strict=True) if len(part)]
    return torch.cat(found) if found else rows @ weight[0].T


# Not compiled: how many tokens an expert gets, which is a number there, would be compiled in.
_one_by_one: Any = torch.compiler.disable(_each_expert)
_GROUPED: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
