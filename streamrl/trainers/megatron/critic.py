"""The critic's model as megatron-core runs it: a body without an output layer, cut as the policy is, and a head on the last stage.

Each tensor rank of that stage has all states and the whole head, so each computes the same values, and the same gradient of the head. Since
gradients of what all hold are summed, that of one rank counts.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from streamrl.trainers.megatron.leaves import added
from streamrl.trainers.megatron.model import MegatronLM
from streamrl.trainers.megatron.ranks import HeldBoxes, MegatronParallel
from streamrl.trainers.torch.critic import HEAD
from streamrl.trainers.torch.kernels import Kernels

_BODY = "model."
"""Begins the names of the body's tensors in a checkpoint of the whole model."""


class MegatronValues:
    """Implements `ValueModel`. The policy was made before it, on the same ranks.

    Args:
        path: directory of a causal language model, whose body it begins with.
        dtype: that the body computes in; leaves, head and moments are float32.
        device: where they lie.
        kernels: how its layers are run.
        parallel: the policy's ranks.

    Raises:
        ConfigError: see `MegatronLM`.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, *, kernels: Kernels, parallel: MegatronParallel) -> None:
        own = parallel.beside()
        self.body = MegatronLM(path, dtype, device, kernels=kernels, parallel=own, headless=True)
        body = [one._replace(part=one.part._replace(name=one.part.name.removeprefix(_BODY))) for one in self.body.leaves]
        here, like = own.stage == own.stages - 1, body[0].value
        head = [added(f"{HEAD}.{name}", shape, like, here=here) for name, shape in (("weight", (1, self.body.width)), ("bias", (1,)))]
        self._head = [leaf.value for leaf in head]
        self._counts = own.lane % own.tensors == 0
        """Whether its gradient of the head is the one that counts, of those of the ranks that have the same."""
        own.leaves = [*body, *head]
        types = {leaf.part.name: dtype for leaf in body} | {leaf.part.name: like.dtype for leaf in head}
        self.held = HeldBoxes(own.leaves, types, own, self.body.arch.model_type, published=False)

    def top(self, states: Tensor) -> Tensor:
        """See `ValueModel`; the last stage has the states."""
        weight, bias = self._head if self._counts else (one.detach() for one in self._head)
        return torch.nn.functional.linear(states.to(weight.dtype), weight, bias)[:, 0]

    def accumulate(self, *, last: bool) -> None:
        """See `MegatronLM`."""
        self.body.accumulate(last=last)

    def forget(self) -> None:
        """See `MegatronLM`."""
        self.body.forget()
