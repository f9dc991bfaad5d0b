"""Models that are looked at and never trained: the reference of a KL, the teacher of a distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from streamrl.config.registry import Role
from streamrl.config.tree import LossConfig
from streamrl.errors import ConfigError
from streamrl.trainers.torch.causal_lm import CausalLM


def load_frozen(
    loss: LossConfig, model_dir: Path, dtype: torch.dtype, device: torch.device, *, attention: Literal["sdpa", "flash"], vocab_size: int
) -> dict[Role, CausalLM]:
    """The models that `loss` looks at, each directory loaded once.

    Args:
        loss: names the directories; without `loss.kl.reference` the reference is the initial policy.
        model_dir: the initial policy.
        dtype: type of the weights.
        device: where they lie.
        attention: see `TrainerConfig`.
        vocab_size: of the policy, which theirs must be, too.

    Raises:
        ConfigError: a directory holds no causal language model, or one of another vocabulary.
    """
    wanted: dict[Role, tuple[str, Path]] = {}
    if loss.kl.loss_coef > 0 or loss.kl.reward_coef > 0:
        wanted[Role.REFERENCE] = ("loss.kl.reference", Path(loss.kl.reference or model_dir))
    if loss.distillation.coef > 0:
        wanted[Role.TEACHER] = ("loss.distillation.teacher", Path(loss.distillation.teacher))
    loaded: dict[Path, CausalLM] = {}
    for key, path in wanted.values():
        if path.resolve() in loaded:
            continue
        model = load_named(key, path, dtype, device, attention=attention)
        if model.vocab_size != vocab_size:
            raise ConfigError(
                f"{key} = {path} has {model.vocab_size} tokens, the policy {vocab_size}",
                hint="it must have the policy's tokenizer",
                key=key,
                expected=vocab_size,
                got=model.vocab_size,
            )
        model.module.requires_grad_(False)
        loaded[path.resolve()] = model
    return {role: loaded[path.resolve()] for role, (_, path) in wanted.items()}


def load_named(
    key: str,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention: Literal["sdpa", "flash"],
    checkpoint_layers: bool = False,
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
        return CausalLM(path, dtype, device, attention=attention, checkpoint_layers=checkpoint_layers)
    except ConfigError as error:
        raise ConfigError(f"{key} = {path}: {error.message}", hint=error.hint, key=key, path=str(path)) from error
