"""What the off-policy correction may not say: the ratio to the sampler counted twice, and bounds that leave nothing or everything out."""

from __future__ import annotations

from streamrl.config.bounds import refuse
from streamrl.config.loss import policy_loss_of, policy_name
from streamrl.config.tree import Config


def check_correction(config: Config) -> None:
    """Raise ConfigError for the first rule of `loss.correction` and `loss.proximal` that does not hold."""
    _check_proximal(config)
    _check_correction(config)
    _check_rejection(config)


def _check_proximal(config: Config) -> None:
    loss, correction = config.loss, config.loss.correction
    policy = policy_name(loss)
    refuse(
        policy_loss_of(loss).anchor == "sampler" and correction.kind != "none",
        f"the policy loss {policy} holds the current policy against the sampler itself; loss.correction.kind = {correction.kind} would "
        "count that ratio twice",
        hint="set loss.correction.kind = 'none'",
        key="loss.correction.kind",
    )
    refuse(
        loss.proximal == "sampler" and correction.kind != "none",
        f"loss.proximal = sampler puts pi / mu into the policy loss ({policy}); loss.correction.kind = {correction.kind} would count it "
        "a second time",
        hint="set loss.correction.kind = 'none', or loss.proximal = 'recomputed'",
        key="loss.correction.kind",
    )
    refuse(
        loss.proximal != "recomputed" and correction.ratio == "current",
        f"loss.correction.ratio = current takes the current policy for the proximal one, but loss.proximal is {loss.proximal}",
        hint="leave one of them out",
        key="loss.correction.ratio",
    )
    refuse(
        loss.proximal == "log_linear" and config.trainer.minibatches == 1,
        "loss.proximal = log_linear needs trainer.minibatches >= 2, got 1: with one step a batch the proximal policy is the current one",
        hint="set loss.proximal = 'recomputed', which costs nothing there",
        key="loss.proximal",
    )
    refuse(
        loss.proximal == "sampler" and bool(correction.reject),
        "loss.proximal = sampler leaves pi_proximal / mu at 1, so loss.correction.reject would reject nothing",
        hint="set loss.proximal = 'recomputed', or leave loss.correction.reject out",
        key="loss.correction.reject",
    )
    refuse(
        loss.proximal == "sampler" and correction.veto > 0,
        "loss.proximal = sampler leaves pi_proximal / mu at 1, so loss.correction.veto would reject nothing",
        hint="set loss.proximal = 'recomputed', or leave loss.correction.veto out",
        key="loss.correction.veto",
    )


def _check_correction(config: Config) -> None:
    c = config.loss.correction
    refuse(
        c.kind in ("clip", "mask") and c.low >= c.high,
        f"loss.correction.low must be below loss.correction.high = {c.high}, got {c.low}",
        hint="for example 0.5 and 2.0",
        key="loss.correction.low",
    )
    refuse(
        c.kind in ("none", "truncate") and c.low > 0,
        f"loss.correction.low is for the kinds clip and mask, got {c.low} with {c.kind}",
        hint="set loss.correction.kind = 'clip', or leave loss.correction.low out",
        key="loss.correction.low",
    )
    refuse(
        c.normalize and c.kind == "none",
        "loss.correction.normalize needs weights, but loss.correction.kind is none",
        hint="choose a kind, or leave loss.correction.normalize out",
        key="loss.correction.normalize",
    )
    refuse(
        c.normalize and (c.ratio == "current" or config.loss.proximal != "recomputed"),
        "loss.correction.normalize needs all weights of a batch before its first step, so loss.proximal = recomputed and "
        f"loss.correction.ratio = proximal; got {config.loss.proximal} and {c.ratio}",
        hint="leave loss.correction.normalize out",
        key="loss.correction.normalize",
    )


def _check_rejection(config: Config) -> None:
    criteria, key = config.loss.correction.reject, "loss.correction.reject"
    for one in criteria:
        refuse(
            one.high <= one.low,
            f"{key} by {one.measure} needs low below high, got {one.low} and {one.high}",
            hint="for example 0.5 and 2.0 for ratio, or 0.0 and 0.1 for k3",
            key=key,
        )
        refuse(
            one.measure != "k1" and one.low < 0,
            f"{key} by {one.measure}, which is never negative, needs a low of at least 0, got {one.low}",
            hint="k1 is the one that has a sign",
            key=key,
        )
        refuse(
            one.measure == "k1" and one.low >= 0,
            f"{key} by k1 needs a low below 0, got {one.low}: k1 has either sign, and what has become more likely than it was would all be "
            "rejected",
            hint="for example -0.1 beside a high of 0.1",
            key=key,
        )
    refuse(
        len({(one.measure, one.level) for one in criteria}) < len(criteria),
        f"{key} names one measure at one level several times",
        hint="the narrower bounds say it all: leave the others out",
        key=key,
    )
