"""The one way from the configuration to a policy loss, and what every policy loss is given, a user's own included."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from streamrl.algorithms.corrections import finite_tokens
from streamrl.algorithms.policy_losses import aipo, cispo, dppo, gspo, opsm_keep, ppo_clip, sapo
from streamrl.algorithms.sequences import Selected, Sequences
from streamrl.config.loss import LossConfig, policy_name
from streamrl.errors import ConfigError


class PolicyTokens(NamedTuple):
    """The tokens of one micro-batch, [M] packed or [N, L] padded; all float tensors have one shape and dtype.

    What stands outside `sequences.mask` may be anything.
    """

    logprobs: Tensor
    """log pi of the policy under training; carries the gradient."""
    proximal: Tensor
    """log pi_proximal, the policy that ratios are taken against."""
    sampler: Tensor
    """log mu, of the policy that sampled the token."""
    advantages: Tensor
    entropy: Tensor | None
    """Of the policy under training, in nats; with gradient where `loss.entropy_coef` is set."""
    reference: Tensor | None
    """log pi_reference, where there is a reference policy."""
    staleness: Tensor
    """Version trained from minus the version that sampled the token, an integer."""
    sequences: Sequences
    """Which tokens belong to which sample."""


PolicyLoss = Callable[[PolicyTokens, LossConfig], tuple[Tensor, dict[str, Tensor]]]
"""Loss of each token, with gradient, and per-token metrics, without: both shaped as the tokens. `policy_loss` is one, and
`loss.policy` may name another."""


def usable_tokens(tokens: PolicyTokens) -> Tensor:
    """Which trained tokens have finite log-probs and advantages, bool, shaped as the tokens; the others are left out of the loss."""
    values = (tokens.logprobs, tokens.proximal, tokens.sampler, tokens.advantages)
    return finite_tokens(tokens.sequences.mask, *values, *(() if tokens.reference is None else (tokens.reference,)))


def policy_loss(tokens: PolicyTokens, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss that the configuration names, with its sequence mask (`opsm_delta`).

    Tokens outside the mask, and those that `usable_tokens` leaves out, have a loss and a gradient of exactly 0 and are in no sequence's
    mean. What is not here, because it is added to or multiplied with any policy loss: the correction's weights, the KL to the reference
    and the entropy.

    Args:
        tokens: of a micro-batch.
        config: which loss, and its numbers.

    Returns:
        Loss of each token and per-token metrics, finite everywhere. The metrics' names depend on the configuration alone.

    Raises:
        ConfigError: `loss.policy` names none of the losses here; a user's function is called in place of this one.
    """
    keep = usable_tokens(tokens)
    logprobs, proximal, sampler, advantages = (
        v.masked_fill(~keep, 0.0) for v in (tokens.logprobs, tokens.proximal, tokens.sampler, tokens.advantages)
    )
    sequences = Selected(tokens.sequences, keep)
    low, high = config.clip_low, config.clip_high
    match policy_name(config):
        case "ppo":
            loss, metrics = ppo_clip(logprobs, proximal, advantages, clip_low=low, clip_high=high, dual_clip=config.dual_clip)
        case "gspo":
            loss, metrics = gspo(logprobs, proximal, advantages, sequences, clip_low=low, clip_high=high)
        case "cispo":
            loss, metrics = cispo(logprobs, proximal, advantages, clip_low=low, clip_high=high)
        case "sapo":
            positive, negative = config.sapo_tau_positive, config.sapo_tau_negative
            loss, metrics = sapo(logprobs, proximal, advantages, tau_positive=positive, tau_negative=negative)
        case "aipo":
            loss, metrics = aipo(logprobs, sampler, advantages, cap=config.aipo_cap)
        case "dppo":
            loss, metrics = dppo(logprobs, sampler, advantages, bound=config.dppo_bound, kl=config.dppo_kl)
        case other:
            raise ConfigError(
                f"expected loss.policy to be ppo, gspo, cispo, sapo, aipo or dppo, got {other!r}",
                hint="a function is resolved with streamrl.config.plugins and called itself",
                key="loss.policy",
            )
    if config.opsm_delta:
        kept, more = opsm_keep(logprobs, proximal, advantages, sequences, delta=config.opsm_delta)
        loss, metrics = loss * kept, {**metrics, **more}
    return loss, metrics
