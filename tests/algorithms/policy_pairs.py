"""Each policy loss beside the second implementation that it is held to, with the numbers that tests run."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from streamrl.algorithms.policy_losses import cispo, clip_cov, gmpo, gspo, gspo_token, kl_cov, ppo_clip, sapo
from streamrl.algorithms.sampler_losses import Divergence, aipo, dppo, m2po, vespo
from tests.algorithms import reference_policy_losses as reference
from tests.algorithms.policy_cases import Layout

Loss = tuple[Tensor, dict[str, Tensor]]
Ours = Callable[[Layout], Loss]
Theirs = Callable[[list[reference.Sequence]], reference.PerToken]
Pair = tuple[Ours, Theirs]


def pair(
    ours: Callable[..., Loss], theirs: Callable[..., Any], names: dict[str, str] | None = None, anchor: str = "old", **how: Any
) -> Pair:
    """Both with the same numbers.

    Args:
        ours: takes log-probs, those of the anchor, advantages, and sequences where `how` says `sequences=True`.
        theirs: takes the sequences.
        anchor: which policy the ratio is against.
        names: of ours, what theirs is called.
        how: the numbers, by our names.
    """
    given = ("logprobs", anchor, "advantages") + (("sequences",) if how.pop("sequences", False) else ())
    called = {(names or {}).get(name, name): value for name, value in how.items()}
    return lambda x: ours(*(getattr(x, name) for name in given), **how), partial(theirs, **called)


CLIPPED = {"clip_low": "low", "clip_high": "high"}
ppo = partial(pair, ppo_clip, reference.ppo, names={**CLIPPED, "dual_clip": "dual"})
of_gspo = partial(pair, gspo, reference.gspo, names=CLIPPED, sequences=True)
of_gspo_token = partial(pair, gspo_token, reference.gspo_token, names=CLIPPED, sequences=True)
of_gmpo = partial(pair, gmpo, reference.gmpo, names={"log_low": "low", "log_high": "high"}, sequences=True)
of_cispo = partial(pair, cispo, reference.cispo, names=CLIPPED)
of_sapo = partial(pair, sapo, reference.sapo)


def of_dppo(bound: float, kl: float, low: float | None = None, divergence: Divergence = "tv", symmetric: bool = False) -> Pair:
    how: dict[str, Any] = {"bound": bound, "kl": kl, "divergence": divergence, "symmetric": symmetric}
    return lambda x: dppo(x.logprobs, x.mu, x.advantages, bound_low=low or 0.0, **how), partial(reference.dppo, low=low, **how)


def of_m2po(far: float) -> Pair:
    """With tokens beyond a distance in the place of those that a whole step's choice leaves out."""
    return (
        lambda x: m2po(x.logprobs, x.mu, x.advantages, (x.logprobs.detach() - x.mu).abs() > far),
        partial(reference.m2po, gone=lambda token: abs(token.logp.item() - token.mu) > far),
    )


def of_vespo(positive: tuple[float, float], negative: tuple[float, float]) -> Pair:
    names = {"c1_positive": positive[0], "c2_positive": positive[1], "c1_negative": negative[0], "c2_negative": negative[1]}
    return (
        lambda x: vespo(x.logprobs, x.mu, x.advantages, x.sequences, **names),
        partial(reference.vespo, positive=positive, negative=negative),
    )


def of_cov(ours: Callable[..., Loss], theirs: Callable[..., Any], names: dict[str, str], **how: float) -> Pair:
    """With tokens of a log-prob above -1 in the place of those that a whole step's choice picks."""
    called = {names.get(name, name): value for name, value in how.items()}
    return (
        lambda x: ours(x.logprobs, x.old, x.advantages, x.logprobs.detach() > -1.0, **how),
        partial(theirs, picked=lambda token: token.logp.item() > -1.0, **called),
    )


PAIRS: dict[str, Pair] = {
    "ppo": ppo(clip_low=0.2, clip_high=0.28, dual_clip=0.0),
    "ppo_narrow": ppo(clip_low=0.05, clip_high=0.1, dual_clip=0.0),
    "ppo_dual": ppo(clip_low=0.2, clip_high=0.28, dual_clip=1.3),
    "gspo": of_gspo(clip_low=0.2, clip_high=0.28),
    "gspo_narrow": of_gspo(clip_low=3e-4, clip_high=4e-4),
    "gspo_token": of_gspo_token(clip_low=0.2, clip_high=0.28),
    "gspo_token_narrow": of_gspo_token(clip_low=3e-4, clip_high=4e-4),
    "gmpo": of_gmpo(log_low=0.4, log_high=0.4),
    "gmpo_narrow": of_gmpo(log_low=0.1, log_high=0.05),
    "cispo": of_cispo(clip_low=1.0, clip_high=0.5),
    "cispo_both": of_cispo(clip_low=0.2, clip_high=0.28),
    "sapo": of_sapo(tau_positive=1.0, tau_negative=1.05),
    "sapo_steep": of_sapo(tau_positive=0.5, tau_negative=4.0),
    "aipo": pair(aipo, reference.aipo, anchor="mu", cap=1.4),
    "dppo": of_dppo(0.1, 1e-3),
    "dppo_plain": of_dppo(0.02, 0.0),
    "dppo_two": of_dppo(0.1, 1e-3, low=0.03),
    "dppo_symmetric": of_dppo(0.1, 0.0, low=0.03, symmetric=True),
    "dppo_kl": of_dppo(0.02, 1e-3, low=0.01, divergence="kl"),
    "dppo_kl_symmetric": of_dppo(0.02, 0.0, divergence="kl", symmetric=True),
    "vespo": of_vespo((2.0, 3.0), (3.0, 2.0)),
    "vespo_flat": of_vespo((0.5, 0.2), (1.0, 0.7)),
    "m2po": of_m2po(0.4),
    "clip_cov": of_cov(clip_cov, reference.clip_cov, CLIPPED, clip_low=0.2, clip_high=0.28),
    "kl_cov": of_cov(kl_cov, reference.kl_cov, {}, coef=0.7),
}
