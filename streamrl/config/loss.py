"""The section `loss` and its parts: advantages, policy loss, off-policy correction, KL, critic, distillation."""

from __future__ import annotations

from typing import Literal

from streamrl.config.bounds import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveFraction, PositiveInt, Section
from streamrl.config.registry import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss

Reduction = Literal["rollout_mean", "token_mean", "sequence_mean", "prompt_mean", "token_mean_legacy", "constant_length"]
KLEstimator = Literal["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+"]

MAX_LOG_RATIO = 20.0
"""No key: wherever exp of a log-ratio is taken, it is clamped to plus and minus this; e^20 is 5e8, whose square float32 still holds."""


SOFTMAX_ROUTERS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next")
"""No key: `model_type` of the mixtures whose routers take the greatest of a softmax, which load, losses and replay of routing know."""


class RejectionConfig(Section, frozen=True, kw_only=True):
    """A criterion that tokens must meet: a table `[[loss.correction.reject]]` for each."""

    measure: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """The ratio rho = pi_proximal / mu, or an estimate of the divergence of pi_proximal from mu."""
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """What is compared with the bounds: each token, or the sum, mean or maximum over a sample's trained tokens; then samples go whole."""
    low: float = 0.0
    """Kept where at least this (`ratio` and `k1`; the others are never negative). k1 has either sign and needs one below 0."""
    high: float = 0.0
    """Kept where at most this; must be set."""


class CorrectionConfig(Section, frozen=True, kw_only=True):
    """Off-policy correction: weights from rho = pi_proximal / mu, where mu is the policy that sampled the token."""

    kind: Literal["none", "truncate", "clip", "mask"] = "truncate"
    """`truncate`: w = min(rho, high). `clip`: w = clamp(rho, low, high). `mask`: w = rho where low <= rho <= high, else 0 (IcePop, MIS)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """What rho is: of each token, the product over a sample's trained tokens, or their geometric mean."""
    low: NonNegativeFloat = 0.0
    """Lower bound of `clip` and `mask`."""
    high: PositiveFloat = 2.0
    """Upper bound."""
    ratio: Literal["proximal", "current"] = "proximal"
    """`proximal`: computed once a batch and kept for all its optimizer steps. `current`: pi_theta / mu, anew at every step, and then the
    policy loss's own ratio is taken against pi_theta too."""
    normalize: bool = False
    """Divide the weights by their mean over the batch: over its tokens, or over its samples where `level` is not `token`."""
    reject: tuple[RejectionConfig, ...] = ()
    """Rejection beside the weights: what does not meet every one of these criteria is left out, see
    [loss.correction.reject](#losscorrectionreject)."""
    veto: Fraction = 0.0
    """A sample with a token whose ratio is below this is rejected whole, for example 1e-4; 0: off."""
    mask_staleness: NonNegativeInt = 0
    """Tokens older than this many versions are masked; 0: off."""
    staleness_decay: PositiveFraction = 1.0
    """Weights are multiplied by this to the power of the token's age in versions."""


class KLConfig(Section, frozen=True, kw_only=True):
    """Distance from a reference policy: in the reward or in the loss, not in both."""

    estimator: KLEstimator = "k1"
    """With r = log pi - log pi_reference: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r; low_var_kl is k3 within +-10, abs is |r|; k1+ and
    k3+ have k1's and k3's value and k2's gradient. In the loss, k1 is of use only where `unbiased`: its own gradient does not see the
    reference."""
    reward_coef: NonNegativeFloat = 0.0
    """Each token's reward is reduced by this times its KL (remax, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo)."""
    loss_coef: NonNegativeFloat = 0.0
    """This times the KL is added to the loss."""
    target: NonNegativeFloat = 0.0
    """Nats a token. After each batch the coefficient is multiplied by 1 + gain clip(KL / target - 1, -0.2, 0.2) (arXiv 1909.08593), and it
    is a part of the checkpoints; 0: constant."""
    gain: PositiveFraction = 0.1
    """See `target`."""
    decay_steps: NonNegativeInt = 0
    """Over so many batches of reinforcement learning the coefficient falls in equal parts to `final_fraction` of itself; 0: constant."""
    final_fraction: Fraction = 0.0
    """What `decay_steps` leaves."""
    unbiased: bool = False
    """Multiply the loss's KL by pi / pi_proximal, which makes its gradient that of the KL (arXiv 2512.02556)."""
    reference: str = ""
    """Model directory of the reference; empty: the initial policy."""
    reference_every: NonNegativeInt = 0
    """After every so many batches of reinforcement learning the policy as it is then becomes the reference, and a part of the checkpoints;
    0: never."""

    @property
    def varies(self) -> bool:
        """Whether the coefficient is not the same in all batches."""
        return self.target > 0 or self.decay_steps > 0


class CriticConfig(Section, frozen=True, kw_only=True):
    """The value function of `loss.advantage = "ppo"`: a model of its own with one output."""

    path: str = ""
    """Model directory whose body it begins with; empty: the initial policy's."""
    learning_rate: NonNegativeFloat = 1e-5
    """Constant."""
    clip: NonNegativeFloat = 0.2
    """How far a value may move from that before the batch until its loss no longer falls (arXiv 1707.06347); 0: off."""
    huber: NonNegativeFloat = 0.0
    """The error counts squared up to this and linearly beyond (P. J. Huber 1964), so that one far return cannot lead; 0: always squared."""
    only_steps: NonNegativeInt = 0
    """Batches at the beginning that train the critic alone."""
    targets: Literal["gae", "vtrace"] = "gae"
    """Returns that it learns: of GAE, or V-trace's, corrected for the age of the tokens (arXiv 1802.01561)."""
    vtrace_rho: PositiveFloat = 1.0
    vtrace_c: PositiveFloat = 1.0


class ExpertsConfig(Section, frozen=True, kw_only=True):
    """Losses of the routers of a mixture of experts (`trainer.backend = "torch"`), added for each layer that has one."""

    balance_coef: NonNegativeFloat = 0.0
    """Times E sum_i f_i P_i, which is 1 where all experts get as much (arXiv 2101.03961, eq. 4): f_i the part of all choices in the
    optimizer step, over all micro-batches and ranks, that is expert i, P_i its mean probability. Takes a forward pass more; 0: off."""
    z_coef: NonNegativeFloat = 0.0
    """Times the mean of the squared logsumexp of a router's logits (arXiv 2202.08906, eq. 5); 0: off."""


class DistillationConfig(Section, frozen=True, kw_only=True):
    """On-policy distillation: A_t -= coef (log pi_proximal - log pi_teacher)."""

    coef: NonNegativeFloat = 0.0
    teacher: str = ""
    """Model directory of the teacher, with the policy's tokenizer."""


OF_LOGITS = "loss.slime_loss"
"""The key of `LossConfig.of_logits`."""


class LossConfig(Section, frozen=True, kw_only=True):
    """What is minimised. docs/algorithms.md says when to use which."""

    advantage: str = "grpo"
    """An estimator (`ppo`: GAE with a critic), or a function as `file.py:name`, `pkg.mod:name` or `pkg.mod.name`. `gspo` and `cispo` are
    read as `grpo` with the policy loss of that name."""
    policy: str = ""
    """A policy loss, or a function; empty: `ppo`."""
    slime_loss: str = ""
    """A loss with slime's signature, (args, batch, logits, sum_of_sample_mean) -> (loss, metrics), in place of all of this."""
    normalize_rewards: bool = True
    """Take the group's mean from the rewards (grpo, reinforce_plus_plus_baseline)."""
    normalize_std: bool = True
    """Divide by the group's standard deviation (grpo, opob); off is Dr.GRPO (arXiv 2503.20783)."""
    std: Literal["group", "batch"] = "group"
    """grpo: whose standard deviation; `batch`: that of all rewards of the batch (arXiv 2508.08221)."""
    leave_one_out: bool = False
    """grpo: take the mean of the group's other rollouts from a reward, in place of that of all, and divide as grpo does."""
    objectives: dict[str, float] = {}
    """gdpo: the parts of the reward that are normalised each by itself, and what each counts (arXiv 2601.05242)."""
    pass_k: PositiveInt = 4
    """pass_at_k: of so many rollouts one is to be right (arXiv 2508.10751)."""
    whiten: Literal["auto", "on", "off"] = "auto"
    """Subtract the mean of all trained tokens' advantages and divide by their deviation; `auto`: where the estimator's paper does."""
    gamma: Fraction = 1.0
    """Discount a token (ppo, reinforce_plus_plus)."""
    gae_lambda: Fraction = 1.0
    """Lambda of GAE (arXiv 1506.02438)."""
    bootstrap_truncated: bool = False
    """ppo: the return of a sample that a length limit truncated goes on with the critic's value of the state behind its last token, in
    place of 0 (arXiv 1712.00378)."""
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.28
    """The policy's ratio is clipped to [1 - clip_low, 1 + clip_high] (ppo, gspo; cispo's usual bounds are 1.0 and 4.0)."""
    dual_clip: NonNegativeFloat = 0.0
    """ppo: a bound c > 1 on the loss of tokens with negative advantage, -c A (arXiv 1912.09729); 0: off."""
    gmpo_low: PositiveFloat = 0.4
    gmpo_high: PositiveFloat = 0.4
    """gmpo: how far a token's log-ratio may fall where the advantage is negative, and rise where it is positive (arXiv 2507.20673)."""
    clip_cov_fraction: PositiveFraction = 2e-4
    """clip_cov: so much of an optimizer step's tokens is detached, drawn from those whose covariance of log pi and advantage is within the
    two bounds (arXiv 2505.22617)."""
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov_fraction: PositiveFraction = 2e-4
    """kl_cov: so much of an optimizer step's tokens, those of the highest covariance, is penalised (arXiv 2505.22617)."""
    kl_cov_coef: NonNegativeFloat = 1.0
    """kl_cov: times |log pi - log pi_proximal|."""
    sapo_tau_positive: PositiveFloat = 1.0
    sapo_tau_negative: PositiveFloat = 1.05
    """sapo: temperatures of the gate for positive and negative advantages (arXiv 2511.20347)."""
    aipo_cap: PositiveFloat = 4.0
    """aipo: upper bound of pi / mu (arXiv 2505.24034)."""
    dppo_bound: PositiveFloat = 0.2
    """dppo: a token is left out once its divergence is above this and its advantage pushes it on (arXiv 2602.04879)."""
    dppo_bound_low: NonNegativeFloat = 0.0
    """dppo: the same for tokens that have become less likely; 0: `dppo_bound`."""
    dppo_divergence: Literal["tv", "kl", "topk_tv", "topk_kl"] = "tv"
    """dppo: of the token and all others, |pi - mu| or KL(mu || pi) in nats; for `kl` a bound of 0.05 is usual. `topk_`: of each of the
    tokens that the sampler held for the likeliest, the token itself and all others."""
    dppo_top_k: PositiveInt = 20
    """dppo: how many those are, which engines then record with every token."""
    dppo_symmetric: bool = False
    """dppo: leave out every token whose divergence is above its bound, whichever way its advantage pushes."""
    dppo_kl: NonNegativeFloat = 1e-3
    """dppo: times (log pi - log mu)^2."""
    vespo_c1_positive: PositiveFloat = 2.0
    vespo_c2_positive: PositiveFloat = 3.0
    vespo_c1_negative: PositiveFloat = 3.0
    vespo_c2_negative: PositiveFloat = 2.0
    """vespo: of the weight W^c1 exp(c2 (1 - W)), W = pi / mu of a whole sample, by the sign of the advantage (arXiv 2602.10693)."""
    m2po_bound: PositiveFloat = 0.04
    """m2po: the tokens that have gone furthest are left out until the mean of (log pi - log mu)^2 is at most this (arXiv 2510.01161)."""
    opsm_delta: NonNegativeFloat = 0.0
    """Mask samples of negative advantage whose mean log(mu / pi) exceeds this (OPSM, arXiv 2512.02556, eq. 9), for example 1e-4; 0: off."""
    proximal: Literal["recomputed", "log_linear", "sampler"] = "recomputed"
    """pi_proximal, the policy at the batch's first step: computed again by the trainer, interpolated between the sampler's and the current
    log-prob by the token's age (spares a forward pass), or the sampler's log-probs themselves (then there is nothing left to correct)."""
    top_entropy: PositiveFraction = 1.0
    """The policy loss of this part of an optimizer step's tokens counts, those of the highest entropy, and its mean is over them
    (arXiv 2506.01939, where it is 0.2); 1: all. KL and entropy are of all tokens."""
    entropy_coef: float = 0.0
    """This times the entropy is subtracted from the loss."""
    reduction: Reduction = "rollout_mean"
    """Mean over each rollout's tokens then over rollouts; mean over all tokens; mean over each sample's tokens then over samples; mean over
    all tokens of each task then over tasks; mean over the tokens of `legacy_samples` samples at a time then over these parts; or a
    rollout's sum over its tokens / constant_length, then the mean over rollouts (Dr.GRPO)."""
    constant_length: NonNegativeInt = 0
    """Tokens, for `reduction = "constant_length"`."""
    legacy_samples: NonNegativeInt = 0
    """For `reduction = "token_mean_legacy"`: mean over the tokens of so many samples at a time, in the order of the batch, then over these
    parts, whatever the trainer's own micro-batches are. To repeat what a trainer with micro-batches of that size did."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    critic: CriticConfig = CriticConfig()
    distillation: DistillationConfig = DistillationConfig()
    experts: ExpertsConfig = ExpertsConfig()

    @property
    def of_logits(self) -> str:
        """A function that is given the logits of whole samples, in place of all of this; empty: none."""
        return self.slime_loss


def policy_name(loss: LossConfig) -> str:
    """The policy loss that `loss.policy` names, or where it is empty `ppo`."""
    return loss.policy or "ppo"


def likeliest_of(loss: LossConfig) -> int:
    """How many of the sampler's likeliest tokens the policy loss looks at beside the sampled one; 0: at none."""
    return loss.dppo_top_k if policy_loss_of(loss).likeliest and loss.dppo_divergence.startswith("topk_") else 0


def estimator_of(loss: LossConfig) -> Estimator:
    """What is known of the advantages that `loss` names; of a user's function nothing."""
    return ESTIMATORS.get(loss.advantage, Estimator())


def policy_loss_of(loss: LossConfig) -> PolicyLoss:
    """What is known of the policy loss that `loss` names; of a user's function nothing."""
    return POLICY_LOSSES.get(policy_name(loss), PolicyLoss(settings={}))


def is_function(name: str) -> bool:
    """Whether a name is that of user code: `file.py:name`, `pkg.mod:name` or `pkg.mod.name`."""
    return "." in name or ":" in name
