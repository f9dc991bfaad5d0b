"""From rewards and log-probs to a loss: estimators of advantages, the objective, policy losses, corrections, KL, reductions, heads.

The names below are the main ones, for use as a library: no configuration file is needed, only `LossConfig` with what differs from its
defaults. They are imported when they are first asked for, so that a process without torch meets none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.algorithms.advantages import distill, grpo, maxrl, rloo, whiten
    from streamrl.algorithms.corrections import correct
    from streamrl.algorithms.estimators import TokenAdvantages, token_advantages
    from streamrl.algorithms.importance import importance_weights
    from streamrl.algorithms.kl import kl_loss
    from streamrl.algorithms.logprobs import linear_logprobs
    from streamrl.algorithms.policy import PolicyTokens, policy_loss
    from streamrl.algorithms.policy_losses import cispo, gspo, ppo_clip, sapo, sft, value_loss
    from streamrl.algorithms.reductions import token_weights
    from streamrl.algorithms.returns import gae, vtrace
    from streamrl.algorithms.sampler_losses import aipo, dppo
    from streamrl.algorithms.sequences import Packed, Padded, packed_sequences
    from streamrl.config.loss import LossConfig
    from streamrl.core.batches import TrainBatch

__all__ = [
    "LossConfig",
    "Packed",
    "Padded",
    "PolicyTokens",
    "TokenAdvantages",
    "TrainBatch",
    "aipo",
    "cispo",
    "correct",
    "distill",
    "dppo",
    "gae",
    "grpo",
    "gspo",
    "importance_weights",
    "kl_loss",
    "linear_logprobs",
    "maxrl",
    "packed_sequences",
    "policy_loss",
    "ppo_clip",
    "rloo",
    "sapo",
    "sft",
    "token_advantages",
    "token_weights",
    "value_loss",
    "vtrace",
    "whiten",
]

_HOMES = {
    "advantages": ("distill", "grpo", "maxrl", "rloo", "whiten"),
    "corrections": ("correct",),
    "estimators": ("TokenAdvantages", "token_advantages"),
    "importance": ("importance_weights",),
    "kl": ("kl_loss",),
    "logprobs": ("linear_logprobs",),
    "policy": ("PolicyTokens", "policy_loss"),
    "policy_losses": ("cispo", "gspo", "ppo_clip", "sapo", "sft", "value_loss"),
    "reductions": ("token_weights",),
    "returns": ("gae", "vtrace"),
    "sampler_losses": ("aipo", "dppo"),
    "sequences": ("Packed", "Padded", "packed_sequences"),
}


def __getattr__(name: str) -> Any:
    if name == "LossConfig":
        return importlib.import_module("streamrl.config.loss").LossConfig
    if name == "TrainBatch":
        return importlib.import_module("streamrl.core.batches").TrainBatch
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'streamrl.algorithms' has no attribute {name!r}")
    return getattr(importlib.import_module(f"streamrl.algorithms.{home}"), name)


def __dir__() -> list[str]:
    return __all__
