"""What the routers of a mixture of experts do in a pass: load of each expert, auxiliary losses, choices that are forced on them.

Letters: `T` positions of a pass, `E` experts, `k` that a token meets, `L` layers that have experts. q is the softmax of a router's logits,
w how many samples a position stands for (0: padding, more than 1: a prompt that a group shares), W the sum of w over an optimizer step,
of all its micro-batches and ranks. Each layer adds to the loss

```text
balance_coef E sum_i f_i P_i      f_i = sum_t w_t [i is chosen at t] / (k W), P_i = sum_t w_t q_ti / W   (Switch, arXiv 2101.03961, eq. 4)
z_coef sum_t w_t lse_t^2 / W      lse_t = log sum_i exp(logit_ti)                                        (ST-MoE, arXiv 2202.08906, eq. 5)
```
f has no gradient, so both are sums over tokens: each position gets its share's gradient where its router is, in the backward pass of the
main loss. What a pass finds is written, not added, to a slot of each layer: a layer that is run again writes the same once more.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from streamrl.config.loss import SOFTMAX_ROUTERS
from streamrl.errors import TrainingError


class _Slot:
    """Of one layer: what its router is told, and what it tells."""

    def __init__(self, *, normalized: bool) -> None:
        self.normalized = normalized
        self.weights: Tensor | None = None
        """[T] w, float32 or the logits' float64; None: nothing is asked for."""
        self.coefs: Tensor | None = None
        """[2] balance_coef E / W and z_coef / W."""
        self.load: Tensor | None = None
        """[E] f."""
        self.forced: Tensor | None = None
        """[T, k] int64."""
        self.chosen: Tensor | None = None
        """[T, k] what was chosen in the last pass, where that is asked for."""
        self.keeps = False
        self.found = torch.zeros(0)
        """[2 E + 1] sums over the last pass: w at chosen experts, w q, w lse^2."""


class Routers:
    """Of one model.

    Args:
        routers: modules that give (logits [T, E], weights of the chosen experts [T, k], their numbers [T, k]), one of each layer that has
            experts, with E as `num_experts` and k as `top_k`; no one: a dense model, or one whose choices are not known.
        normalized: whether a token's weights are divided by their sum.
    """

    def __init__(self, routers: Sequence[Any] = (), *, normalized: bool = True) -> None:
        self._slots: list[_Slot] = []
        for router in routers:
            slot = _Slot(normalized=normalized)
            router.routing = slot
            router.register_forward_hook(_routed)
            self._slots.append(slot)
        self.experts: int = routers[0].num_experts if routers else 0
        """E."""
        self.per_token: int = routers[0].top_k if routers else 0
        """k."""
        self.observed = False
        """Whether passes that train are told of weights."""
        self.adds = False
        """Whether they have auxiliary losses, too."""

    def __len__(self) -> int:
        return len(self._slots)

    def tell(self, weights: Tensor | None, coefs: Tensor | None = None, load: Tensor | None = None) -> None:
        """From here on passes are over positions of these weights [T]; None: nothing is asked for.

        Args:
            weights: w, of float32; of a model in float64 that.
            coefs: [2] see `_Slot`; None: no auxiliary loss.
            load: [L, E] f; needed with `coefs`.
        """
        for number, slot in enumerate(self._slots):
            slot.weights, slot.coefs = weights, coefs
            slot.load = None if load is None else load[number]
            if weights is not None and not slot.found.numel():
                slot.found = weights.new_zeros(2 * self.experts + 1)

    def told(self) -> Tensor:
        """[L, 2 E + 1] what the last pass found, a copy; see `_Slot.found`."""
        return torch.stack([slot.found for slot in self._slots])

    @contextmanager
    def rehearsing(self, positions: int, like: Tensor) -> Generator[None]:
        """While entered, a pass over so many positions is run as one that trains, and nothing comes of it; of the type of `like`."""
        if not (self.observed and len(self)):
            yield
            return
        nothing = like.new_zeros(2) if self.adds else None
        self.tell(like.new_zeros(positions), nothing, like.new_zeros(len(self), self.experts) if self.adds else None)
        try:
            yield
        finally:
            self.tell(None)

    @contextmanager
    def forcing(self, chosen: Tensor) -> Generator[None]:
        """While entered, tokens go to these experts [T, L, k], whatever their routers choose (R3, arXiv 2510.11370).

        They are weighed by the router as it is: its softmax at these experts, divided by their sum where the model does so.

        Raises:
            TrainingError: another number of layers or of experts a token, or an expert that there is not.
        """
        wanted, shape = (len(self), self.per_token), tuple(chosen.shape)
        if shape[1:] != wanted:
            raise TrainingError(
                f"expected experts [tokens, layers, experts per token] = [T, {wanted[0]}, {wanted[1]}], got {list(shape)}",
                hint="were they chosen by a model of another architecture?",
                expected=wanted,
                got=shape,
            )
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.experts:
            raise TrainingError(f"expected numbers of experts from 0 to {self.experts - 1}, got {int(chosen.min())} to {int(chosen.max())}")
        for number, slot in enumerate(self._slots):
            slot.forced = chosen[:, number].long()
        try:
            yield
        finally:
            for slot in self._slots:
                slot.forced = None

    @contextmanager
    def choosing(self) -> Generator[list[Tensor]]:
        """While entered, what the last pass chose is kept; the list has [T, L, k] int64 in the end."""
        found: list[Tensor] = []
        for slot in self._slots:
            slot.keeps = True
        try:
            yield found
            found.append(torch.stack([slot.chosen for slot in self._slots if slot.chosen is not None], 1))
        finally:
            for slot in self._slots:
                slot.keeps, slot.chosen = False, None


def routers_of(module: Any) -> Routers:
    """Those of a causal language model of transformers."""
    config = module.config.get_text_config()
    if config.model_type not in SOFTMAX_ROUTERS:
        return Routers()
    found = [one for one in module.get_decoder().modules() if type(one).__name__.endswith("TopKRouter")]
    return Routers(found, normalized=bool(getattr(config, "norm_topk_prob", True)))  # Mixtral has no choice


def loads(found: Tensor, total: float, per_token: int) -> Tensor:
    """[L, E] f from sums [L, 2 E + 1] over positions that stand for `total` tokens."""
    experts = found.shape[1] // 2
    return found[:, :experts] / (per_token * total)


def expert_metrics(found: Tensor, total: float, per_token: int) -> dict[str, float]:
    """Metrics of an optimizer step.

    Args:
        found: [L, 2 E + 1] sums over its positions.
        total: W.
        per_token: k.
    """
    sums, total = found.double(), max(total, 1.0)
    experts = sums.shape[1] // 2
    load = loads(sums, total, per_token)
    mean = sums[:, experts : 2 * experts] / total
    entropy = torch.special.entr(load).sum(1).min()
    return {
        "train/expert_load_max": float(load.max()) * experts,
        "train/expert_load_min": float(load.min()) * experts,
        "train/expert_load_entropy": float(entropy) / math.log(experts) if experts > 1 else 1.0,
        "train/balance_loss": float((load * mean).sum(1).mean()) * experts,
        "train/router_z_loss": float(sums[:, -1].mean()) / total,
    }


def _routed(router: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Behind each router's forward pass: logits [T, E], weights of the chosen experts [T, k], their numbers [T, k]."""
    slot: _Slot = router.routing
    if slot.forced is None and slot.weights is None and not slot.keeps:
        return None
    logits, scores, chosen = output
    if slot.forced is not None:
        chosen = slot.forced
        scores = _at(logits, chosen, normalized=slot.normalized).to(scores.dtype)
    if slot.keeps:
        slot.chosen = chosen.detach()
    if slot.weights is not None:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        q, squared = wide.softmax(-1), wide.logsumexp(-1).square()
        with torch.no_grad():
            here = (chosen[:, :, None] == torch.arange(q.shape[1], device=q.device)).any(1)
            w = slot.weights
            slot.found.copy_(torch.cat([w @ here.to(w.dtype), w @ q, (w @ squared)[None]]))
        if slot.coefs is not None and slot.load is not None and torch.is_grad_enabled():
            added = (slot.weights * (slot.coefs[0] * (q @ slot.load) + slot.coefs[1] * squared)).sum()
            scores = _attached(scores, added)
    return logits, scores, chosen


def _at(logits: Tensor, chosen: Tensor, *, normalized: bool) -> Tensor:
    """[T, k] float32 weights of these experts, by the arithmetic of transformers' routers."""
    found = logits.softmax(-1, dtype=torch.float32).gather(1, chosen)
    return found / found.sum(-1, keepdim=True) if normalized else found


class _Attached(torch.autograd.Function):
    """(values, loss) to values: whoever comes back through them adds the gradient of the loss, once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (loss,) = ctx.saved_tensors
        return grad_outputs[0], torch.ones_like(loss)


_attached: Any = _Attached.apply
