"""AdamW with gradient clipping on named parameters, whose whole state is a flat mapping of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from streamrl.config.tree import OptimizerConfig
from streamrl.errors import TrainingError
from streamrl.trainers.protocol import not_finite
from streamrl.trainers.torch.parallel import local

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class ClippedAdamW:
    """AdamW (arXiv 1711.05101) in float32 behind a global-norm clip. Weight decay applies to matrices, not to norms and biases.

    Parameters of less than float32 get a float32 master copy, which the update is made on and which gradients of several
    micro-batches are summed in; an update smaller than a bfloat16's rounding would otherwise be lost. A gradient is moved there as soon
    as a backward pass has it, so that those of the parameters' own type are never in memory together.

    Args:
        parameters: name and parameter, in a fixed order. Of those that are cut into parts (DTensor, float32 at least) the master is what
            this rank holds, and all that this class is given or gives is of that part.
        config: rates are given to `step`; `learning_rate` and the schedule's fields are not used here.
        norm: of all elements of the tensors that this rank holds, or holds its part of.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        config: OptimizerConfig,
        *,
        norm: Callable[[Sequence[Tensor]], Tensor] = torch.nn.utils.get_total_norm,
    ) -> None:
        self._config = config
        self._parameters = parameters
        self._norm = norm
        self.masters = [(name, _master(p)) for name, p in parameters]
        self._adam = self._fresh()
        for (_, p), (_, master) in zip(parameters, self.masters, strict=True):
            if master is not p and not isinstance(p, DTensor):
                p.register_post_accumulate_grad_hook(partial(_move_gradient, master))

    def reset(self) -> None:
        """Forget the moments; master copies stay."""
        self._adam = self._fresh()

    def gradients(self) -> list[Tensor]:
        """The summed gradients, zeros where a parameter has none, in parameter order; written to in place by data parallelism."""
        for (_, p), (_, master) in zip(self._parameters, self.masters, strict=True):
            if isinstance(p, DTensor) and p.grad is not None:  # summed there by torch.distributed.fsdp
                master.grad, p.grad = local(p.grad), None
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for _, master in self.masters if master.grad is not None]

    def discard(self) -> None:
        """Forget the gradients that have been summed."""
        for (_, p), (_, master) in zip(self._parameters, self.masters, strict=True):
            p.grad = master.grad = None

    def step(self, learning_rate: float) -> tuple[float, bool]:
        """One update from the summed gradients, which are cleared.

        Returns:
            The gradient's global norm before clipping, and whether it was finite. If it was not, nothing is changed.

        Raises:
            WeightsDiverged: the update made a parameter that is not finite.
        """
        norm = self._norm(self.gradients())
        finite = bool(torch.isfinite(norm))
        if finite:
            bound = self._config.clip_norm
            if bound > 0 and bool(bound / (norm + 1e-6) < 1):  # else it would multiply each by 1
                torch.nn.utils.clip_grads_with_norm_([master for _, master in self.masters], bound, norm)
            for group in self._adam.param_groups:
                group["lr"] = learning_rate
            self._adam.step()
            with torch.no_grad():
                for (_, p), (_, master) in zip(self._parameters, self.masters, strict=True):
                    if master is not p and not isinstance(p, DTensor):
                        p.copy_(master)
            if not torch.isfinite(self._norm([local(p) for _, p in self._parameters])):
                raise not_finite(float(norm), learning_rate)
        for _, master in self.masters:
            master.grad = None
        return float(norm), finite

    def state(self) -> dict[str, Tensor]:
        """The moments (none before the first step) and the master copies: the memory that `step` writes."""
        found: dict[str, Tensor] = {}
        for (name, p), (_, master) in zip(self._parameters, self.masters, strict=True):
            for moment, value in self._adam.state.get(master, {}).items():
                found[f"{name}.{moment}"] = value
            if master is not p:
                found[f"{name}.master"] = master.detach()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave.

        Raises:
            TrainingError: it belongs to other parameters.
        """
        self.reset()
        known = {f"{name}.{part}" for name, _ in self._parameters for part in (*MOMENTS, "master")}
        if unknown := sorted(set(state) - known):
            raise TrainingError(f"expected optimizer state of this model's parameters, got {unknown[0]} and {len(unknown) - 1} others")
        with torch.no_grad():
            for (name, p), (_, master) in zip(self._parameters, self.masters, strict=True):
                if f"{name}.master" in state or not (master is p or isinstance(p, DTensor)):
                    master.copy_(state[f"{name}.master"])
                if f"{name}.step" in state:
                    # The step counter of the fused implementation lies beside the parameter.
                    self._adam.state[master] = {moment: state[f"{name}.{moment}"].clone().to(master.device) for moment in MOMENTS}

    def _fresh(self) -> torch.optim.AdamW:
        c = self._config
        matrices = [master for _, master in self.masters if master.ndim >= 2]
        others = [master for _, master in self.masters if master.ndim < 2]
        groups = [{"params": matrices, "weight_decay": c.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=c.learning_rate, betas=(c.beta1, c.beta2), eps=c.eps, fused=True)


def _move_gradient(master: torch.nn.Parameter, parameter: Tensor) -> None:
    assert parameter.grad is not None  # a hook behind its accumulation
    master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
    parameter.grad = None


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if isinstance(parameter, DTensor):
        return torch.nn.Parameter(local(parameter))
    return parameter if parameter.dtype in (torch.float32, torch.float64) else torch.nn.Parameter(parameter.detach().float())
