"""A layer's mixture of experts, which several ranks hold a part of each: tokens travel to their experts, and what these make of them back.

Letters as in `streamrl.trainers.torch.experts`, and `P` ranks with `E / P` experts each.

```text
own pairs, by expert [S]  --exchange-->  pairs of own experts, by rank [S']  --permute-->  by expert  --two products-->  [S']  and back
counts [P, E / P]         --exchange-->  counts of each rank for own experts
```
megatron-core has such layers too; its way without Transformer Engine multiplies one expert at a time. This one multiplies as the `torch`
backend does, sends the router's weights along, and sums nothing by atomic additions: on equal ranks equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.trainers.megatron.names import Parameter, Part
from streamrl.trainers.torch.experts import by_expert, permute, products, sums
from streamrl.trainers.torch.layers import not_compiled


class TopKRouter(torch.nn.Module):
    """The experts that a token meets, by a softmax over all of them in float32.

    Args:
        experts: E.
        per_token: k.
        hidden: H.
        normalized: divide a token's weights by their sum.
    """

    def __init__(self, experts: int, per_token: int, hidden: int, *, normalized: bool) -> None:
        super().__init__()
        self.num_experts, self.top_k, self._normalized = experts, per_token, normalized
        self.weight = torch.nn.Parameter(torch.empty(experts, hidden))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H] to logits [T, E], weights [T, k] and numbers [T, k] of the chosen experts."""
        logits = torch.nn.functional.linear(states, self.weight)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        weights, chosen = wide.softmax(-1).topk(self.top_k, dim=-1)
        if self._normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen


class Mixture(torch.nn.Module):
    """In the place of a layer's MLP: router, and this rank's experts in two matrices.

    Args:
        router: of all experts.
        hidden: H.
        inner: I, of an expert.
        parts: P.
        group: those ranks; None where P is 1.
    """

    def __init__(self, router: TopKRouter, *, hidden: int, inner: int, parts: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.router = router
        self.here = router.num_experts // parts
        self.gate_up = torch.nn.Parameter(torch.empty(self.here * 2 * inner, hidden))
        self.down = torch.nn.Parameter(torch.empty(self.here * hidden, inner))
        self._parts, self._group = parts, group

    def forward(self, states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[L, R, H] to the same, and no bias."""
        positions, rows, hidden = states.shape
        tokens = states.transpose(0, 1).reshape(-1, hidden)
        _, weights, chosen = self.router(tokens)
        order, places, ends = by_expert(chosen.flatten(), self.router.num_experts)
        pairs = permute(tokens, order, places, self.router.top_k), permute(weights.reshape(-1, 1), order, places, 1)
        outer = self._own(*pairs, ends) if self._group is None else self._elsewhere(*pairs, ends)
        return sums(outer, order, places, self.router.top_k).view(rows, positions, hidden).transpose(0, 1), None

    def _own(self, pairs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """[S', H] of pairs that stand by expert, those of own expert e up to `ends[e]`."""
        gate, up = products(pairs, self.gate_up.view(self.here, -1, pairs.shape[1]), ends).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up * weights
        return products(inner.to(pairs.dtype), self.down.view(self.here, pairs.shape[1], -1), ends)

    @not_compiled
    def _elsewhere(self, pairs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """[S, H] of own pairs, which stand by expert of all ranks. Not compiled with its layer: S' differs from pass to pass."""
        # counts[p, e]: own pairs for expert e of rank p; coming[p, e]: pairs of rank p for own expert e. Two ranks, two experts each:
        # here counts [[1, 0], [2, 2]], there [[3, 1], [0, 1]]. Here come [[1, 0], [3, 1]]: pair 0 is of expert 0, 1 .. 3 too, 4 of 1.
        counts = ends.diff(prepend=ends.new_zeros(1)).view(self._parts, self.here)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts.contiguous(), group=self._group)
        # The host waits for these numbers: it must know how much memory to take.
        sent, got = torch.stack([counts, coming]).sum(2).tolist()
        experts = torch.arange(self.here, device=coming.device).repeat(self._parts).repeat_interleave(coming.flatten())
        order, places, own_ends = by_expert(experts, self.here)
        pairs, weights = (permute(_exchange(each, sent, got, self._group), order, places, 1) for each in (pairs, weights))
        return _exchange(permute(self._own(pairs, weights, own_ends), places, order, 1), got, sent, self._group)


class _Exchange(torch.autograd.Function):
    """Rows for each rank, `sent` of them one after the other, against those of each rank, `got` of them; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = got, sent, group
        found = rows.new_empty((sum(got), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), list(got), list(sent), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.apply(*grad_outputs, *ctx.way), None, None, None


_exchange: Any = _Exchange.apply


def in_matrices(parameters: Iterable[Parameter], experts: int) -> Iterator[Parameter]:
    """What `names.parameters` says, with a layer's experts as they are held here: one behind another in `gate_up` and in `down`.

    These are rows of what transformers holds a layer's experts in, so masters, moments and checkpoints are those of the `torch` backend.

    Args:
        parameters: of a rank.
        experts: E.

    Example, of the second of two ranks and four experts of I = 1, H = 2: `gate_up` [4, 2] has the rows gate 2, up 2, gate 3, up 3, and is
    the box from (2, 0, 0) on of `experts.gate_up_proj` [4, 2, 2].
    """
    for layer, found in groupby(parameters, lambda one: one.layer if one.expert is not None else None):
        if layer is None:
            yield from found
            continue
        held = list(found)
        stem, first = held[0].name.partition(".experts.")[0], held[0].expert
        for name, kind in (("gate_up", "linear_fc1"), ("down", "linear_fc2")):
            own = [one.shape for one in held if f".{kind}." in one.name]
            (rows, width), count = own[0], len(own)
            assert first is not None
            tensor = f"model.layers.{layer}.mlp.experts.{name}_proj"
            part = Part(tensor, (experts, rows, width), (first, 0, 0), (count, rows, width), 0, count * rows, count * rows, owner=True)
            yield Parameter(f"{stem}.{name}", (count * rows, width), (part,), layer)
