"""The critic: the body of a causal language model with one output, trained beside the policy on the same micro-batches.

It is saved with the policy and restored with it; engines never see it. Letters: `T` tokens of the batch, `M` of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.algorithms.policy_losses import value_loss
from streamrl.config.loss import CriticConfig
from streamrl.config.tree import OptimizerConfig
from streamrl.core.packing import MicroBatch
from streamrl.tensors.transfer import on_device
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.checkpoint import ModelState
from streamrl.trainers.torch.frozen import load_named
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.optimizer import ClippedAdamW
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.sharding import Held, cut
from streamrl.trainers.torch.terms import Sums

HEAD = "value_head"


class Critic:
    """V of the state before each token. Its head begins at 0, so every value does.

    Args:
        model_dir: directory of the initial policy, whose body it begins with unless `config.path` names another.
        dtype: type of the body's weights; the head is of float32 at least.
        device: where they lie.
        config: the section `loss.critic`.
        optimizer: the policy's, of which it takes all but the rate.
        kernels: by which its body is run.
        parallel: the ranks that it is trained on.

    Raises:
        ConfigError: there is no model in the directory.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        config: CriticConfig,
        optimizer: OptimizerConfig,
        kernels: Kernels,
        parallel: Parallel,
    ) -> None:
        path = Path(config.path or model_dir)
        self._config = config
        self._model = load_named("loss.critic.path", path, partial(CausalLM, dtype=dtype, device=device, kernels=kernels))
        self._model.drop_head()
        self._head = torch.nn.Linear(self._model.width, 1, dtype=dtype if dtype.itemsize >= 4 else torch.float32, device=device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        types = {name: parameter.dtype for name, parameter in self._named()}
        self._model.cut(parallel, trained=True)
        self._top = cut(self._head, [], parallel, self._head.weight.dtype, trained=True) if parallel.sharded else None
        self._held = Held(self._named(), types, parallel, self._model.module.config.model_type)
        self._optimizer = ClippedAdamW(self._held.parameters, optimizer, norm=parallel.norm)

    @property
    def body(self) -> CausalLM:
        """The model below the head."""
        return self._model

    @property
    def free_masks(self) -> bool:
        """See `CausalLM`."""
        return self._model.free_masks

    @property
    def packs(self) -> bool:
        """See `CausalLM`."""
        return self._model.packs

    @property
    def width(self) -> int:
        """See `CausalLM`."""
        return self._model.width

    def values(self, micro: MicroBatch) -> Tensor:
        """[M] V before each of `micro.target`, with gradient; never divided by a temperature."""
        share = self._model.share(micro)
        states = self._model.states(share.micro).to(self._head.weight.dtype)
        values = self._head(states) if self._top is None else self._top(partial(self._head, states))
        return share.everyones(values[:, 0])[0]

    def accumulate(self, *, last: bool) -> None:
        """See `CausalLM`."""
        self._model.accumulate(last=last)
        if self._top is not None:
            self._top.accumulate(last=last)

    def idle(self, micro: MicroBatch) -> None:
        """Run along where other ranks have a micro-batch and this one has none but an empty one."""
        values = self.values(micro)
        values.backward(torch.zeros_like(values))

    def learn(self, micro: MicroBatch, weights: Tensor, old_values: npt.NDArray[np.floating], returns: npt.NDArray[np.floating]) -> Sums:
        """Add the gradient of one micro-batch.

        Args:
            micro: the micro-batch.
            weights: [M] float64 of the reduction; 0 at tokens that are left out.
            old_values: [T] before the batch's first step.
            returns: [T] what is learned.

        Returns:
            Sums over the micro-batch, with these weights: `train/value_loss` and `train/value_clipfrac`.
        """
        values = self.values(micro)
        old, target = (on_device(a[micro.target], values.device, values.dtype) for a in (old_values, returns))
        loss, metrics = value_loss(values, old, target, clip=self._config.clip)
        (loss * weights.to(loss.dtype)).sum().backward()
        named = {"train/value_loss": loss.detach(), **metrics}
        return Sums(tuple(named), torch.stack([(found.double() * weights).sum() for found in named.values()]))

    def gradients(self) -> list[Tensor]:
        """The summed gradients, written to in place by data parallelism."""
        return self._optimizer.gradients()

    def discard(self) -> None:
        """Forget the gradients that have been summed."""
        self._optimizer.discard()

    def step(self) -> tuple[float, bool]:
        """One update; the gradient's norm, and False when it was not finite and nothing was changed."""
        done = self._optimizer.step(self._config.learning_rate)
        self._forget()
        return done

    def norm(self) -> float:
        """Of all parameters together, in float64: a number that shows where two critics differ."""
        if self._held.parallel.sharded:
            return float(self._held.parallel.norm([one.rows.double() for one in self._held.slices()]))
        return float(torch.stack([parameter.detach().double().square().sum() for _, parameter in self._held.parameters]).sum().sqrt())

    def state(self) -> ModelState:
        """See `Held.state`; all ranks that hold a copy together call it."""
        return self._held.state(self._optimizer.state(), self._held.digest())

    def restore(self, state: ModelState, where: Path) -> None:
        """Take what `state` gave; raises as `Held.check`."""
        self._held.check(state, where, "a critic")
        self._held.take(state.parameters)
        self._forget()
        self._optimizer.restore(state.optimizer)

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._model.body_parameters()
        yield from ((f"{HEAD}.{name}", parameter) for name, parameter in self._head.named_parameters())

    def _forget(self) -> None:
        self._model.forget()
        if self._top is not None:
            self._top.forget()
