"""The critic: the body of a causal language model with one output, trained beside the policy on the same micro-batches.

It is saved with the policy and restored with it; engines never see it. Letters: `T` tokens of the batch, `M` of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.algorithms.policy_losses import value_loss
from streamrl.config.loss import CriticConfig
from streamrl.config.tree import OptimizerConfig
from streamrl.core.packing import MicroBatch
from streamrl.models.checkpoint import ModelState
from streamrl.models.tensor_files import Box
from streamrl.tensors.transfer import on_device
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.frozen import load_named
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.language_model import LanguageModel
from streamrl.trainers.torch.optimizer import ClippedAdamW
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.sharding import Held, cut
from streamrl.trainers.torch.terms import Sums

HEAD = "value_head"


class ValueModel(Protocol):
    """What `Critic` needs of a model: Hugging Face's (`TorchValues`) or one of another framework. It is cut by its making.

    Its head begins at 0, and is of float32 at least.
    """

    @property
    def body(self) -> LanguageModel:
        """The model below the head."""
        ...

    @property
    def held(self) -> Held:
        """The parameters of both, by their name within the body, and behind them those of the head."""
        ...

    def top(self, states: Tensor) -> Tensor:
        """What the head makes of hidden states [m, H] of the body: values [m], with gradient."""
        ...

    def accumulate(self, *, last: bool) -> None:
        """See `LanguageModel`."""
        ...

    def forget(self) -> None:
        """See `LanguageModel`."""
        ...


LoadValues = Callable[[Path], ValueModel]
"""Makes one of a directory; raises ConfigError."""


class TorchValues:
    """Implements `ValueModel` by transformers.

    Args:
        path: directory of a causal language model, whose body it begins with.
        dtype: type of the body's weights.
        device: where they lie.
        kernels: by which the body is run.
        parallel: the ranks that it is trained on.

    Raises:
        ConfigError: there is no model in the directory.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, *, kernels: Kernels, parallel: Parallel) -> None:
        self.body = CausalLM(path, dtype, device, kernels=kernels)
        self.body.drop_head()
        self._head = torch.nn.Linear(self.body.width, 1, dtype=dtype if dtype.itemsize >= 4 else torch.float32, device=device)
        # Not by torch.nn.init: while transformers loads a model, in whatever thread, its functions do nothing.
        self._head.weight.data.zero_()
        self._head.bias.data.zero_()
        types = {name: parameter.dtype for name, parameter in self._named()}
        self.body.cut(parallel, trained=True)
        self._unit = cut(self._head, [], parallel, self._head.weight.dtype, trained=True) if parallel.sharded else None
        self.held = Held(self._named(), types, parallel, self.body.module.config.model_type)

    def top(self, states: Tensor) -> Tensor:
        """See `ValueModel`."""
        states = states.to(self._head.weight.dtype)
        values: Tensor = self._head(states) if self._unit is None else self._unit(partial(self._head, states))
        return values[:, 0]

    def accumulate(self, *, last: bool) -> None:
        """See `CausalLM`."""
        self.body.accumulate(last=last)
        if self._unit is not None:
            self._unit.accumulate(last=last)

    def forget(self) -> None:
        """See `CausalLM`."""
        self.body.forget()
        if self._unit is not None:
            self._unit.forget()

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.body.body_parameters()
        yield from ((f"{HEAD}.{name}", parameter) for name, parameter in self._head.named_parameters())


class Critic:
    """V of the state before each token, which is 0 at the beginning.

    Args:
        load: makes the model of a directory, on the ranks that it is trained on.
        model_dir: directory of the initial policy, whose body it begins with unless `config.path` names another.
        config: the section `loss.critic`.
        optimizer: the policy's, of which it takes all but the rate.

    Raises:
        ConfigError: there is no model in the directory, or one that cannot be trained on these ranks.
    """

    def __init__(self, load: LoadValues, model_dir: Path, *, config: CriticConfig, optimizer: OptimizerConfig) -> None:
        self._config = config
        self._model = load_named("loss.critic.path", Path(config.path or model_dir), load)
        self._held = self._model.held
        self._parallel = self._held.parallel
        self._optimizer = ClippedAdamW(self._held.parameters, optimizer, norm=self._parallel.norm)

    @property
    def body(self) -> LanguageModel:
        """The model below the head."""
        return self._model.body

    @property
    def boxes(self) -> Mapping[str, Box]:
        """See `Held.boxes`."""
        return self._held.boxes

    def values(self, micro: MicroBatch) -> Tensor:
        """[M] V before each of `micro.target`, with gradient; never divided by a temperature. Call it at the body's `turns`."""
        share = self.body.share(micro)
        return share.everyones(self._model.top(self.body.states(share.micro)))[0]

    def accumulate(self, *, last: bool) -> None:
        """Call it before each micro-batch of an optimizer step."""
        self._model.accumulate(last=last)

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
        loss, metrics = value_loss(values, old, target, clip=self._config.clip, huber=self._config.huber)
        (loss * weights.to(loss.dtype)).sum().backward()
        named = {"train/value_loss": loss.detach(), **metrics}
        return Sums(tuple(named), torch.stack([(found.double() * weights).sum() for found in named.values()]))

    def sum_gradients(self) -> None:
        """Over the ranks."""
        self._parallel.sum_gradients(self._optimizer.gradients())

    def discard(self) -> None:
        """Forget the gradients that have been summed."""
        self._optimizer.discard()

    def step(self) -> tuple[float, bool]:
        """One update; the gradient's norm, and False when it was not finite and nothing was changed."""
        done = self._optimizer.step(self._config.learning_rate)
        self._model.forget()
        return done

    def norm(self) -> float:
        """Of all parameters together, as they are rounded, in float64: a number that shows where two critics differ."""
        rows = [one.rows.double() for one in self._held.slices()]
        if self._parallel.sharded:
            return float(self._parallel.norm(rows))
        return float(torch.stack([one.square().sum() for one in rows]).sum().sqrt())

    def state(self) -> ModelState:
        """See `Held.state`; all ranks that hold a copy together call it."""
        return self._held.state(self._optimizer.state(), self._held.digest())

    def restore(self, state: ModelState, where: Path) -> None:
        """Take what `state` gave; raises as `Held.check`."""
        self._held.check(state, where, "a critic")
        self._held.take(state.parameters)
        self._model.forget()
        self._optimizer.restore(state.optimizer)
