"""The critic: the body of a causal language model with one output, trained beside the policy on the same micro-batches.

It is saved with the policy and restored with it; engines never see it. Letters: `T` tokens of the batch, `M` of a micro-batch.
"""

from __future__ import annotations

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
from streamrl.trainers.torch.checkpoint import ModelState, check_state, digest_of, host_copy
from streamrl.trainers.torch.frozen import load_named
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.optimizer import ClippedAdamW
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
    ) -> None:
        path = Path(config.path or model_dir)
        self._config = config
        self._model = load_named("loss.critic.path", path, dtype, device, kernels=kernels)
        self._model.drop_head()
        self._head = torch.nn.Linear(self._model.width, 1, dtype=dtype if dtype.itemsize >= 4 else torch.float32, device=device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        head = [(f"{HEAD}.{name}", parameter) for name, parameter in self._head.named_parameters()]
        self._parameters = [*self._model.body_parameters(), *head]
        self._optimizer = ClippedAdamW(self._parameters, optimizer)

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
        return self._head(self._model.states(micro).to(self._head.weight.dtype))[:, 0]

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
        return self._optimizer.step(self._config.learning_rate)

    def norm(self) -> float:
        """Of all parameters together, in float64: a number that shows where two critics differ."""
        return float(torch.stack([parameter.detach().double().square().sum() for _, parameter in self._parameters]).sum().sqrt())

    def state(self) -> ModelState:
        """Copies of everything that the next step depends on."""
        parameters = {name: host_copy(parameter) for name, parameter in self._parameters}
        return ModelState(parameters=parameters, optimizer=self._optimizer.state(), digest=digest_of(parameters.items()))

    def restore(self, state: ModelState, where: Path) -> None:
        """Take what `state` gave; raises TrainingError where it is of another model, or was damaged."""
        check_state(state, dict(self._parameters), where, "a critic")
        with torch.no_grad():
            for name, parameter in self._parameters:
                parameter.copy_(state.parameters[name])
        self._optimizer.restore(state.optimizer)
