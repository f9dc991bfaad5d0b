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

import numpy as np
import torch
from torch import Tensor

from streamrl.config.loss import SOFTMAX_ROUTERS
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import MicroBatch
from streamrl.errors import TrainingError
from streamrl.tensors.transfer import on_device


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
        """[T, k] int64; -1 where the router chooses."""
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
        depth: layers of the model; 0: all of them have experts.
        layers: number of each router's layer among these, from 0.
    """

    def __init__(
        self, routers: Sequence[Any] = (), *, normalized: bool = True, depth: int = 0, layers: Sequence[int] | None = None
    ) -> None:
        self._depth = depth or len(routers)
        self._layers = list(range(len(routers)) if layers is None else layers)
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
        self.replays = False
        """Whether passes are told where tokens go."""

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
        if not len(self):
            yield
            return
        nothing = like.new_zeros(2) if self.adds else None
        if self.observed:
            self.tell(like.new_zeros(positions), nothing, like.new_zeros(len(self), self.experts) if self.adds else None)
        if self.replays:
            self._force(like.new_full((positions, len(self), self.per_token), -1, dtype=torch.int64))
        try:
            yield
        finally:
            self.tell(None)
            self._force(None)

    def check(self, batch: TrainBatch) -> None:
        """Raise TrainingError where a batch says of its tokens what cannot be replayed here: other layers, experts that there are not."""
        experts = batch.routed_experts
        if experts is None:
            return
        wanted = (batch.num_tokens, self._depth, self.per_token)
        if not len(self) or experts.shape != wanted:
            raise TrainingError(
                f"expected routed experts [tokens, layers, experts per token] = {list(wanted)}, got {list(experts.shape)}",
                hint="were they chosen by a model of another architecture?" if len(self) else "the policy has no routers known here",
                expected=wanted,
                got=experts.shape,
            )
        own = experts[:, self._layers]
        _check_numbers(int(own.min()), int(own.max()), self.experts)

    def route(self, batch: TrainBatch, micro: MicroBatch, device: torch.device) -> None:
        """From here on tokens of this micro-batch go where the batch says, also where a layer is run again in the backward pass.

        To be called before each pass, also of a batch that says nothing: its routers choose.
        """
        if batch.routed_experts is None:
            self._force(None)
            return
        fed = micro.fed.ravel()
        chosen = np.where((fed < 0)[:, None, None], np.int16(-1), batch.routed_experts[fed][:, self._layers])
        self._force(on_device(chosen, device))

    def free(self) -> None:
        """From here on routers choose."""
        self._force(None)

    def _force(self, chosen: Tensor | None) -> None:
        for number, slot in enumerate(self._slots):
            slot.forced = None if chosen is None else chosen[:, number].long()

    @contextmanager
    def forcing(self, chosen: Tensor) -> Generator[None]:
        """While entered, tokens go to these experts [T, L, k], whatever their routers choose (R3, arXiv 2510.11370).

        They are weighed by the router as it is: its softmax at these experts, divided by their sum where the model does so. Where they are
        -1 the router chooses.

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
        _check_numbers(int(chosen.min()), int(chosen.max()), self.experts)
        self._force(chosen)
        try:
            yield
        finally:
            self.free()

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
    found = {name: one for name, one in module.get_decoder().named_modules() if type(one).__name__.endswith("TopKRouter")}
    return Routers(
        list(found.values()),
        normalized=bool(getattr(config, "norm_topk_prob", True)),  # Mixtral has no choice
        depth=config.num_hidden_layers,
        layers=[int(name.split(".")[1]) for name in found],  # layers.3.mlp.gate
    )


def _check_numbers(least: int, most: int, experts: int) -> None:
    if not -1 <= least <= most < experts:
        raise TrainingError(
            f"expected numbers of experts from 0 to {experts - 1}, or -1, got {least} to {most}",
            hint="were they chosen by a model of another architecture?",
        )


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
        chosen = torch.where(slot.forced < 0, chosen, slot.forced)
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
