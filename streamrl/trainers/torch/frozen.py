"""Models that are looked at and never trained: the reference of a KL, the teacher of a distillation.

A reference may be renewed: then it takes over the policy's parameters now and again (`Reference`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from streamrl.config.registry import Role
from streamrl.config.tree import LossConfig
from streamrl.core.batches import TrainBatch
from streamrl.errors import ConfigError
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.checkpoint import ModelState, check_state, digest_of, host_copy
from streamrl.trainers.torch.kernels import Kernels


def load_frozen(
    loss: LossConfig, model_dir: Path, dtype: torch.dtype, device: torch.device, *, kernels: Kernels, vocab_size: int
) -> dict[Role, CausalLM]:
    """The models that `loss` looks at, each directory loaded once; a reference that is renewed is a model of its own.

    Args:
        loss: names the directories; without `loss.kl.reference` the reference is the initial policy.
        model_dir: the initial policy.
        dtype: type of the weights.
        device: where they lie.
        kernels: by which they are run.
        vocab_size: of the policy, which theirs must be, too.

    Raises:
        ConfigError: a directory holds no causal language model, or one of another vocabulary.
    """
    wanted: dict[Role, tuple[str, Path]] = {}
    if loss.kl.loss_coef > 0 or loss.kl.reward_coef > 0:
        wanted[Role.REFERENCE] = ("loss.kl.reference", Path(loss.kl.reference or model_dir))
    if loss.distillation.coef > 0:
        wanted[Role.TEACHER] = ("loss.distillation.teacher", Path(loss.distillation.teacher))
    loaded: dict[tuple[Path, bool], CausalLM] = {}
    kernels = replace(kernels, kept_layers=None)  # there is no backward pass

    def place(role: Role, path: Path) -> tuple[Path, bool]:
        return path.resolve(), role == Role.REFERENCE and loss.kl.reference_every > 0

    for role, (key, path) in wanted.items():
        if place(role, path) in loaded:
            continue
        model = load_named(key, path, dtype, device, kernels=kernels)
        if model.vocab_size != vocab_size:
            raise ConfigError(
                f"{key} = {path} has {model.vocab_size} tokens, the policy {vocab_size}",
                hint="it must have the policy's tokenizer",
                key=key,
                expected=vocab_size,
                got=model.vocab_size,
            )
        model.module.requires_grad_(False)
        loaded[place(role, path)] = model
    return {role: loaded[place(role, path)] for role, (_, path) in wanted.items()}


class Reference:
    """A reference that becomes the policy as it is after every so many batches. When that is, the batch says, so a restart need not know.

    Args:
        model: the reference.
        policy: the policy's parameters, name and tensor.
        every: batches of reinforcement learning from one renewal to the next.

    Raises:
        ConfigError: the model is not of the policy's architecture.
    """

    def __init__(self, model: CausalLM, policy: Sequence[tuple[str, torch.nn.Parameter]], *, every: int) -> None:
        self._parameters = dict(model.parameters())
        self._policy = policy
        self._every = every
        ours = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if ours != {name: tuple(parameter.shape) for name, parameter in policy}:
            raise ConfigError(
                "loss.kl.reference_every puts the policy in the place of loss.kl.reference, which is a model of another architecture",
                hint="leave one of the two out",
                key="loss.kl.reference_every",
            )
        self.digest = digest_of(self._parameters.items())
        """Of its parameters."""

    def due(self, batch: TrainBatch) -> bool:
        """Whether it is renewed before this batch is trained."""
        return batch.kind == "rl" and batch.stage_step > 0 and batch.stage_step % self._every == 0

    @torch.no_grad()
    def renew(self, digest: str) -> None:
        """Take over the policy's parameters, which have this digest."""
        for name, parameter in self._policy:
            self._parameters[name].copy_(parameter)
        self.digest = digest

    def state(self) -> ModelState:
        """A copy of its parameters."""
        return ModelState(parameters={name: host_copy(p) for name, p in self._parameters.items()}, optimizer={}, digest=self.digest)

    @torch.no_grad()
    def restore(self, state: ModelState, where: Path) -> None:
        """Take what `state` gave; raises TrainingError where it is of another model, or was damaged."""
        check_state(state, self._parameters, where, "a reference")
        for name, parameter in self._parameters.items():
            parameter.copy_(state.parameters[name])
        self.digest = state.digest


def load_named(
    key: str,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kernels: Kernels,
) -> CausalLM:
    """A causal language model whose errors name the configuration's key; raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(
            f"expected {key} to name a model directory, got no such directory: {path}",
            hint=f"put it back, or name its new place: {key} in the TOML file, with --set, or in a recording's config.json",
            key=key,
            path=str(path),
        )
    try:
        return CausalLM(path, dtype, device, kernels=kernels)
    except ConfigError as error:
        raise ConfigError(f"{key} = {path}: {error.message}", hint=error.hint, key=key, path=str(path)) from error
