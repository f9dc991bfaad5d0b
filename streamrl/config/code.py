"""Code that a configuration names: what runs when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.config.loss import is_function
from streamrl.config.tree import Config
from streamrl.errors import ConfigError


def loss_code(config: Config) -> Mapping[str, str]:
    """By key, the functions of the user's that a trainer runs."""
    loss = config.loss
    named = {"loss.advantage": loss.advantage, "loss.policy": loss.policy, "loss.slime_loss": loss.slime_loss}
    return {key: reference for key, reference in named.items() if is_function(reference)}


def rollout_code(config: Config) -> Mapping[str, str]:
    """By key, the functions of the user's that producers and evaluators run."""
    named = {"producer.function": config.producer.function, "reward.kind": config.reward.kind}
    return {key: reference for key, reference in named.items() if is_function(reference)}


def check_trust(named: Mapping[str, str], whose: str, *, trusted: bool) -> None:
    """Whoever made a run or a recording decides what its configuration names, and so what would run here.

    Args:
        named: what would run, by key.
        whose: "the recording DIR", "a run of user 1000"; empty: our own.
        trusted: `--trust-code` was given.

    Raises:
        ConfigError: it is not our own, names code, and was not trusted.
    """
    if whose and named and not trusted:
        said = ", ".join(f"{key} = {reference!r}" for key, reference in named.items())
        raise ConfigError(
            f"{whose} names code that would run here: {said}",
            hint="read that code first; --trust-code runs it",
            key=next(iter(named)),
        )
