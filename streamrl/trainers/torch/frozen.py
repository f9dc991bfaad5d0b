"""Models that are looked at and never trained: the reference of a KL, the teacher of a distillation.

A reference may be renewed: then it takes over the policy's parameters now and again (`Reference`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from msgspec.structs import replace

from streamrl.config.registry import Role
from streamrl.config.tree import LossConfig
from streamrl.core.batches import TrainBatch
from streamrl.errors import ConfigError
from streamrl.models.checkpoint import ModelState
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.language_model import LanguageModel
from streamrl.trainers.torch.parallel import Parallel, local
from streamrl.trainers.torch.sharding import Held

Model = TypeVar("Model")


class Load(Protocol):
    """Makes a model that no gradient is asked of."""

    def __call__(self, path: Path, /, *, renewed: bool) -> LanguageModel:
        """Of a directory; with `renewed` its parameters are written later. Raises ConfigError."""
        ...


def load_frozen(loss: LossConfig, model_dir: Path, load: Load, *, vocab_size: int, parallel: Parallel) -> dict[Role, LanguageModel]:
    """The models that `loss` looks at, each directory loaded once; a reference that is renewed is a model of its own.

    Args:
        loss: names the directories; without `loss.kl.reference` the reference is the initial policy.
        model_dir: the initial policy.
        load: one of them.
        vocab_size: of the policy, which theirs must be, too.
        parallel: the ranks; models are cut as the policy is, but for a reference that is renewed, which `Reference` cuts.

    Raises:
        ConfigError: a directory holds no causal language model, or one of another vocabulary.
    """
    wanted: dict[Role, tuple[str, Path]] = {}
    if loss.kl.loss_coef > 0 or loss.kl.reward_coef > 0:
        wanted[Role.REFERENCE] = ("loss.kl.reference", Path(loss.kl.reference or model_dir))
    if loss.distillation.coef > 0:
        wanted[Role.TEACHER] = ("loss.distillation.teacher", Path(loss.distillation.teacher))
    loaded: dict[tuple[Path, bool], LanguageModel] = {}

    def place(role: Role, path: Path) -> tuple[Path, bool]:
        return path.resolve(), role == Role.REFERENCE and loss.kl.reference_every > 0

    for role, (key, path) in wanted.items():
        if place(role, path) in loaded:
            continue
        model = load_named(key, path, partial(load, renewed=place(role, path)[1]))
        if model.vocab_size != vocab_size:
            raise ConfigError(
                f"{key} = {path} has {model.vocab_size} tokens, the policy {vocab_size}",
                hint="it must have the policy's tokenizer",
                key=key,
                expected=vocab_size,
                got=model.vocab_size,
            )
        if not place(role, path)[1]:
            model.cut(parallel, trained=False)
        loaded[place(role, path)] = model
    return {role: loaded[place(role, path)] for role, (_, path) in wanted.items()}


class Reference:
    """A reference that becomes the policy as it is after every so many batches. When that is, the batch says, so a restart need not know.

    Args:
        model: the reference, whole yet.
        policy: the policy's parameters.
        every: batches of reinforcement learning from one renewal to the next.

    Raises:
        ConfigError: the model is not of the policy's architecture.
    """

    def __init__(self, model: LanguageModel, policy: Held, *, every: int) -> None:
        self._model = model
        self._held = model.cut(policy.parallel, trained=False)
        self._policy = policy
        self._every = every
        ours, theirs = ({name: tuple(parameter.shape) for name, parameter in held.parameters} for held in (self._held, policy))
        if ours != theirs:
            raise ConfigError(
                "loss.kl.reference_every puts the policy in the place of loss.kl.reference, which is a model of another architecture",
                hint="leave one of the two out",
                key="loss.kl.reference_every",
            )
        self.digest = self._held.digest()
        """Of its parameters."""

    def due(self, batch: TrainBatch) -> bool:
        """Whether it is renewed before this batch is trained."""
        return batch.kind == "rl" and batch.stage_step > 0 and batch.stage_step % self._every == 0

    @torch.no_grad()
    def renew(self, digest: str) -> None:
        """Take over the policy's parameters, which have this digest."""
        for (_, own), (_, policy) in zip(self._held.parameters, self._policy.parameters, strict=True):
            local(own).copy_(local(policy))
        self._model.forget()
        self.digest = digest

    def state(self) -> ModelState:
        """See `Held.state`."""
        return self._held.state({}, self.digest)

    def restore(self, state: ModelState, where: Path) -> None:
        """Take what `state` gave; raises as `Held.check`."""
        self._held.check(state, where, "a reference")
        self._held.take(state.parameters)
        self._model.forget()
        self.digest = state.digest


def load_torch(path: Path, dtype: torch.dtype, device: torch.device, kernels: Kernels, *, renewed: bool) -> CausalLM:
    """See `Load`: by transformers; a model that is renewed is like another."""
    model = CausalLM(path, dtype, device, kernels=replace(kernels, kept_layers=None))  # there is no backward pass
    model.module.requires_grad_(False)
    return model


def load_named(key: str, path: Path, load: Callable[[Path], Model]) -> Model:
    """What `load` makes of a model's directory, with errors that name the configuration's key; raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(
            f"expected {key} to name a model directory, got no such directory: {path}",
            hint=f"put it back, or name its new place: {key} in the TOML file, with --set, or in a recording's config.json",
            key=key,
            path=str(path),
        )
    try:
        return load(path)
    except ConfigError as error:
        raise ConfigError(f"{key} = {path}: {error.message}", hint=error.hint, key=key, path=str(path)) from error
