"""A layer's mixture of experts, which several ranks hold a part of each: tokens travel to their experts, and what these make of them back.

Letters as in `streamrl.trainers.torch.experts`, and `P` ranks with `E / P` experts each.

```text
own tokens [T]  --exchange-->  tokens of any rank that meet own experts [G]  --permute-->  pairs by expert [S]  --two products-->  [S]
sums of what came back, a rank's each [T]  <--exchange--  weighted sums over a token's own experts [G]  <--------------------------'
```
A token goes to each rank once, however many of its experts that rank holds, with its weights beside it: of 8 experts on 2 ranks a
quarter of what pairs would take. megatron-core has such layers too; its way without Transformer Engine multiplies one expert at a time.
This one multiplies as the `torch` backend does, and sums nothing by atomic additions: on equal ranks equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.decorators import maybe_mark_dynamic

from streamrl.models.megatron.names import Parameter, Part
from streamrl.trainers.torch.experts import added, by_expert, permute, products, sums
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
        if self._group is None:
            found = self._met(tokens, weights, by_expert(chosen.flatten(), self.here), _PLAIN)
        else:
            found = self._everywhere(torch.cat([tokens, weights], 1), chosen, self._ranks(chosen), torch.compiler.is_compiling())
        return found.view(rows, positions, hidden).transpose(0, 1), None

    def _ranks(self, chosen: Tensor) -> Tensor:
        """[T, min(P, k)] the ranks of the experts [T, k] that a token meets, each once, and P for those that are fewer."""
        ranks = (chosen // self.here).sort(-1).values
        again = torch.nn.functional.pad(ranks[:, 1:] == ranks[:, :-1], (1, 0))
        return torch.where(again, self._parts, ranks).sort(-1).values[:, : self._parts]

    def _met(self, tokens: Tensor, weights: Tensor, met: tuple[Tensor, Tensor, Tensor], ways: _Ways) -> Tensor:
        """[T, H] weighted sums over the own experts that tokens [T, H] meet: order, places and ends of their pairs."""
        (order, places, ends), k = met, weights.shape[1]
        both = products(ways.permute(tokens, order, places, k), self.gate_up.view(self.here, -1, tokens.shape[1]), ends)
        inner = ways.gated(both, weights, order, places)
        return ways.sums(products(inner, self.down.view(self.here, tokens.shape[1], -1), ends), order, places, k)

    @not_compiled
    def _everywhere(self, beside: Tensor, chosen: Tensor, ranks: Tensor, compiled: bool) -> Tensor:
        """[T, H] of own tokens [T, H + k], weights beside them, which meet `chosen` [T, k] on `ranks` [T, m].

        Not compiled with its layer: sizes differ from pass to pass. Example, two ranks of two experts each, k = 2: of tokens that meet
        0 3, 1 0 and 2 3 rank 0 gets the first two, in that order, with 0 2 and 1 0 (2: of none here), rank 1 the first and the last one,
        with 2 1 and 0 1.
        """
        k, slots, here = chosen.shape[1], ranks.shape[1], self.here
        ways = _compiled_ways() if compiled else _PLAIN
        order, places, ends = by_expert(ranks.flatten(), self._parts)
        pairs = (chosen.flatten() // here == torch.arange(self._parts, device=chosen.device)[:, None]).sum(1)
        assert self._group is not None
        trip = _Trip(torch.stack([ends.diff(prepend=ends.new_zeros(1)), pairs]), slots, ways, self._group)
        first = ranks.flatten()[order][:, None] * here  # expert of the rank that a row goes to
        experts = chosen[order // slots] - first
        experts = torch.where((experts >= 0) & (experts < here), experts, here).int()
        rows = _there(beside, order, places, trip)
        met, met_places, met_ends = by_expert(trip.go(experts).flatten(), here)
        tokens, weights = rows.split([rows.shape[1] - k, k], 1)
        found = self._met(tokens, weights, (met[: trip.pairs], met_places, met_ends), ways)
        return _back(found, order, places, trip)


def _gated(both: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """[S, I] silu(gate) up times the pair's weight; `both` [S, 2 I], weights [T, k]."""
    gate, up = both.chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up * permute(weights.reshape(-1, 1), order, places, 1)
    return inner.to(both.dtype)


class _Ways(NamedTuple):
    """How what is between products and exchanges is run."""

    rows: Callable[[Tensor, Tensor, int], Tensor]
    """(values [T, N], order [S], k) to row `order[s] // k` for each of S."""
    added: Callable[[Tensor, Tensor, int], Tensor]
    """`streamrl.trainers.torch.experts.added`"""
    permute: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    gated: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _rows(values: Tensor, order: Tensor, k: int) -> Tensor:
    return values[order // k]


_PLAIN = _Ways(_rows, added, permute, sums, _gated)


@cache
def _compiled_ways() -> _Ways:
    """Each compiled by itself, for any number of rows."""
    return _Ways(*(_any_length(one) for one in (_rows, added, _permuted, _summed, _gated)))


def _permuted(values: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
    return permute(values, order, places, k)


def _summed(values: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
    return sums(values, order, places, k)


def _any_length(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    fast = torch.compile(function, dynamic=False)

    def run(*given: Any) -> Tensor:
        for one in given:
            if isinstance(one, Tensor):
                maybe_mark_dynamic(one, 0)
        return fast(*given)

    return run


class _Trip:
    """What goes from rank to rank in a layer's pass, and how much of it.

    Args:
        counts: [2, P] own tokens that go to each rank, and pairs that they are there.
        slots: ranks that a token goes to at most.
        ways: how rows are laid out.
        group: the ranks.
    """

    def __init__(self, counts: Tensor, slots: int, ways: _Ways, group: dist.ProcessGroup) -> None:
        self.slots, self.ways, self._group = slots, ways, group
        coming = torch.empty_like(counts.T, memory_format=torch.contiguous_format)
        dist.all_to_all_single(coming, counts.T.contiguous(), group=group)
        both = torch.stack([counts, coming.T])
        self._told = torch.empty(both.shape, dtype=both.dtype, pin_memory=both.is_cuda).copy_(both, non_blocking=True)
        self._event = torch.cuda.Event() if both.is_cuda else None
        if self._event is not None:
            self._event.record()
        self._sent: list[int] = []
        self._got: list[int] = []
        self.pairs = 0
        """Of own experts, from all ranks; known once rows have gone."""

    def go(self, rows: Tensor) -> Tensor:
        """[G, ...] rows that come from each rank for [S, ...] rows for each, those behind them left out. Here the host waits, once."""
        if not self._got:  # it must know how much memory to take; what was begun before is computed meanwhile
            if self._event is not None:
                self._event.synchronize()
            (self._sent, _), (self._got, own) = self._told.tolist()
            self.pairs = sum(own)
        return self._exchange(rows[: sum(self._sent)], self._sent, self._got)

    def come(self, rows: Tensor) -> Tensor:
        """[S, ...] rows back where they came from, or their gradient."""
        return self._exchange(rows, self._got, self._sent)

    def _exchange(self, rows: Tensor, sent: list[int], got: list[int]) -> Tensor:
        found = rows.new_empty((sum(got), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), got, sent, group=self._group)
        return found


class _There(torch.autograd.Function):
    """[G, N] rows of all ranks' tokens for own experts, from own [T, N]; a token's gradient is the sum of what comes back of its rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, places: Tensor, trip: _Trip) -> Tensor:
        ctx.save_for_backward(places)
        ctx.trip = trip
        return trip.go(trip.ways.rows(values, order, trip.slots))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        trip: _Trip = ctx.trip
        return trip.ways.added(trip.come(grad_outputs[0]), ctx.saved_tensors[0], trip.slots), None, None, None


class _Back(torch.autograd.Function):
    """The transposed map: [T, N] sums of what the ranks made of own tokens, from [G, N] what was made here of all ranks'."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, places: Tensor, trip: _Trip) -> Tensor:
        ctx.save_for_backward(order)
        ctx.trip = trip
        return trip.ways.added(trip.come(values), places, trip.slots)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        trip: _Trip = ctx.trip
        return trip.go(trip.ways.rows(grad_outputs[0], ctx.saved_tensors[0], trip.slots)), None, None, None


_there: Any = _There.apply
_back: Any = _Back.apply


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
