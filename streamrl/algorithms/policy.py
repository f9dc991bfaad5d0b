"""The one way from the configuration to a policy loss, and what every policy loss is given, a user's own included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from streamrl.algorithms.corrections import finite_tokens
from streamrl.algorithms.policy_losses import cispo, clip_cov, gmpo, gspo, gspo_token, kl_cov, opsm_keep, ppo_clip, sapo
from streamrl.algorithms.sampler_losses import aipo, dppo, m2po, vespo
from streamrl.algorithms.sequences import Selected, Sequences
from streamrl.config.loss import LossConfig, likeliest_of, policy_loss_of, policy_name
from streamrl.errors import ConfigError, TrainingError


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
    staleness: Tensor
    """Version trained from minus the version that sampled the token, an integer."""
    sequences: Sequences
    """Which tokens belong to which sample."""
    entropy: Tensor | None = None
    """Of the policy under training, in nats; with gradient where `loss.entropy_coef` is set."""
    reference: Tensor | None = None
    """log pi_reference, where there is a reference policy."""
    chosen: Tensor | None = None
    """Bool: what the policy loss chose of the optimizer step's tokens, where it does (`streamrl.algorithms.choices.decide`)."""
    apart: Tensor | None = None
    """How far the policy has gone from the sampler by the tokens that this held for the likeliest, where the policy loss goes by that."""
    share: Tensor | None = None
    """What the trainer multiplies the policy loss by, where `loss.top_entropy` leaves tokens out."""


PolicyLoss = Callable[[PolicyTokens, LossConfig], tuple[Tensor, dict[str, Tensor]]]
"""Loss of each token, with gradient, and per-token metrics, without: both shaped as the tokens. `policy_loss` is one, and
`loss.policy` may name another."""


POLICY_LOSSES: Mapping[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = MappingProxyType(
    {
        "ppo": ppo_clip,
        "gspo": gspo,
        "gspo_token": gspo_token,
        "gmpo": gmpo,
        "cispo": cispo,
        "clip_cov": clip_cov,
        "kl_cov": kl_cov,
        "sapo": sapo,
        "aipo": aipo,
        "dppo": dppo,
        "vespo": vespo,
        "m2po": m2po,
    }
)
"""The code of what `streamrl.config.registry.POLICY_LOSSES` describes."""


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
        TrainingError: the policy loss goes by a choice, and there is none.
    """
    keep = usable_tokens(tokens)
    logprobs, proximal, sampler, advantages = (
        v.masked_fill(~keep, 0.0) for v in (tokens.logprobs, tokens.proximal, tokens.sampler, tokens.advantages)
    )
    sequences = Selected(tokens.sequences, keep)
    name, known = policy_name(config), policy_loss_of(config)
    if name not in POLICY_LOSSES:
        raise ConfigError(
            f"expected loss.policy to be {', '.join(POLICY_LOSSES)}, got {name!r}",
            hint="a function is resolved with streamrl.config.plugins and called itself",
            key="loss.policy",
        )
    anchor = sampler if known.anchor == "sampler" else proximal
    given = (sequences,) if known.sequences else ()
    if known.choice is not None:
        if tokens.chosen is None:
            raise TrainingError(
                f"expected PolicyTokens.chosen, which loss.policy = {name} goes by, got None",
                hint="ask streamrl.algorithms.choices.decide about the whole optimizer step",
                policy=name,
            )
        given = (*given, tokens.chosen & keep)
    if likeliest_of(config):
        if tokens.apart is None:
            raise TrainingError(
                f"expected PolicyTokens.apart, which loss.dppo_divergence = {config.dppo_divergence} goes by, got None",
                hint="streamrl.algorithms.divergences.candidate_divergence gives it",
                policy=name,
            )
        given = (*given, tokens.apart.masked_fill(~keep, 0.0))
    settings = {argument: getattr(config, key) for argument, key in known.settings.items()}
    loss, metrics = POLICY_LOSSES[name](logprobs, anchor, advantages, *given, **settings)
    if config.opsm_delta:
        kept, more = opsm_keep(logprobs, sampler, advantages, sequences, delta=config.opsm_delta)
        loss, metrics = loss * kept, {**metrics, **more}
    return loss, metrics
