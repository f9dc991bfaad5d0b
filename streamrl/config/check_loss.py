"""What the section `loss` may not say: names that there are not, and parts that contradict each other or count something twice."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from streamrl.config.bounds import refuse
from streamrl.config.loss import OF_LOGITS, CriticConfig, KLConfig, LossConfig, estimator_of, is_function, policy_loss_of, policy_name
from streamrl.config.registry import ESTIMATORS, POLICY_LOSSES, Role, reading
from streamrl.config.tree import Config

_OF_ESTIMATORS = {
    "normalize_std": ", which divides by no group's deviation",
    "normalize_rewards": "",
    "std": ", which divides by no deviation of a batch's rewards",
    "leave_one_out": "",
    "objectives": "",
    "pass_k": "",
    "gamma": ", which knows no later tokens",
    "gae_lambda": "",
    "bootstrap_truncated": ", which has no critic",
}
"""Settings that only some estimators read, and why the others do not."""


def check_loss(config: Config) -> None:
    """Raise ConfigError for the first rule of `loss` that does not hold; looks at no file."""
    _check_name("loss.advantage", config.loss.advantage, ESTIMATORS)
    if config.loss.policy:
        _check_name("loss.policy", config.loss.policy, POLICY_LOSSES)
    _check_advantages(config)
    _check_objectives(config)
    _check_policy(config)
    _check_policy_settings(config)
    _check_choices(config)
    _check_correction(config)
    _check_kl(config)
    _check_critic(config)
    _check_models(config)
    if config.trainer.tabular:
        _check_table(config)


def _check_name(key: str, name: str, known: Collection[str]) -> None:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    refuse(
        name not in known and not is_function(name),
        f"{key} must be {', '.join(known)} or a function, got {name!r}",
        hint=f"did you mean {near[0]}?" if near else "write a function as file.py:name, pkg.mod:name or pkg.mod.name",
        key=key,
    )


def _check_advantages(config: Config) -> None:
    loss, name, size = config.loss, config.loss.advantage, config.tasks.num_rollouts
    built_in = not is_function(name)
    refuse(
        estimator_of(loss).grouped and size == 1 and (loss.normalize_rewards or name not in reading("normalize_rewards")),
        f"loss.advantage = {name} compares the rollouts of a task, but tasks.num_rollouts is 1: every advantage would be 0",
        hint="use several rollouts a task, or remax, reinforce_plus_plus or ppo",
        key="tasks.num_rollouts",
    )
    for setting, why in _OF_ESTIMATORS.items():
        value, default = getattr(loss, setting), getattr(LossConfig(), setting)
        readers = reading(setting)
        refuse(
            built_in and value != default and name not in readers,
            f"loss.{setting} = {str(value).lower()} is for {' and '.join(readers)}, got loss.advantage = {name}{why}",
            hint=f"leave loss.{setting} out",
            key=f"loss.{setting}",
        )
    refuse(
        name == "pass_at_k" and loss.pass_k >= size,
        f"loss.pass_k must be below tasks.num_rollouts = {size}, got {loss.pass_k}: the only group of so many would be all rollouts, and "
        "none could add to it",
        hint="lower loss.pass_k, or raise tasks.num_rollouts",
        key="loss.pass_k",
    )
    refuse(
        loss.std == "batch" and not (loss.normalize_std and loss.normalize_rewards),
        "loss.std = batch is for dividing by it, got loss.normalize_std or loss.normalize_rewards = false",
        hint="leave one of the two out",
        key="loss.std",
    )
    refuse(
        loss.leave_one_out and not (loss.normalize_std and loss.normalize_rewards),
        "loss.leave_one_out is for dividing what it leaves, got loss.normalize_std or loss.normalize_rewards = false",
        hint='take loss.advantage = "rloo", which divides by nothing',
        key="loss.leave_one_out",
    )
    refuse(
        estimator_of(loss).whitened and loss.whiten == "off",
        f"loss.whiten = off with loss.advantage = {name}: whitening is what scales its advantages (arXiv 2501.03262)",
        hint="leave loss.whiten out, or use grpo",
        key="loss.whiten",
    )


def _check_objectives(config: Config) -> None:
    loss, reward = config.loss, config.reward
    if loss.advantage != "gdpo":
        return
    zero = [name for name, weight in loss.objectives.items() if weight == 0 or not name]
    refuse(
        not loss.objectives or bool(zero),
        f"loss.advantage = gdpo needs loss.objectives: parts of the reward and weights other than 0, got {loss.objectives}",
        hint="for example loss.objectives = { correct = 1.0, format = 0.5 }",
        key="loss.objectives",
    )
    refuse(
        reward.kind == "late" or reward.workers > 0,
        "loss.advantage = gdpo reads the parts of rewards beside the samples, where those of rewards that come later do not stand",
        hint="let producers score: leave out reward.workers, and name a reward in reward.kind",
        key="loss.advantage",
    )
    refuse(
        config.tasks.drop_zero_variance,
        "loss.advantage = gdpo with tasks.drop_zero_variance, which drops groups whose rewards add up to the same, whatever their parts",
        hint="set tasks.drop_zero_variance = false",
        key="tasks.drop_zero_variance",
    )
    refuse(
        reward.overlong_buffer > 0 or reward.length.kind != "none",
        "loss.advantage = gdpo looks at parts of the rewards alone: reward.overlong_buffer and reward.length would do nothing",
        hint="leave them out, or give length as a part of the reward",
        key="reward.overlong_buffer" if reward.overlong_buffer else "reward.length.kind",
    )


def _check_policy(config: Config) -> None:
    loss, policy = config.loss, policy_name(config.loss)
    refuse(
        bool(loss.of_logits) and loss.policy not in ("", "gspo", "cispo"),  # slime calls them estimators, and its losses look at the name
        f"{OF_LOGITS} takes the place of the policy loss, but loss.policy is {loss.policy}",
        hint="keep one of the two",
        key=OF_LOGITS,
    )
    refuse(
        bool(loss.of_logits) and not is_function(loss.of_logits),
        f"{OF_LOGITS} must be a function, got {loss.of_logits!r}",
        hint="write it as file.py:name, pkg.mod:name or pkg.mod.name",
        key=OF_LOGITS,
    )
    refuse(
        0 < loss.dual_clip <= 1,
        f"loss.dual_clip must be 0 (off) or above 1, got {loss.dual_clip}: at 1 or below it would bound tokens that have not moved",
        hint="arXiv 1912.09729 uses 3",
        key="loss.dual_clip",
    )
    refuse(
        loss.clip_low > 1,
        f"loss.clip_low must be at most 1, got {loss.clip_low}: a ratio is never below 0",
        hint="1.0 leaves the lower side open",
        key="loss.clip_low",
    )
    refuse(
        (loss.reduction == "constant_length") != (loss.constant_length > 0),
        f"loss.reduction = constant_length and loss.constant_length go together, got {loss.reduction} and {loss.constant_length}",
        hint="for example sampling.max_new_tokens",
        key="loss.constant_length",
    )
    refuse(
        (loss.reduction == "token_mean_legacy") != (loss.legacy_samples > 0),
        f"loss.reduction = token_mean_legacy and loss.legacy_samples go together, got {loss.reduction} and {loss.legacy_samples}",
        hint="as many samples as a micro-batch had; or reduction = 'token_mean', which has no parts",
        key="loss.legacy_samples",
    )
    refuse(
        loss.opsm_delta > 0 and (is_function(policy) or bool(loss.of_logits)),
        "loss.opsm_delta belongs to the built-in policy losses, but the policy loss is a function",
        hint="use streamrl.algorithms.policy_losses.opsm_keep in it, and leave loss.opsm_delta out",
        key="loss.opsm_delta",
    )


def _check_policy_settings(config: Config) -> None:
    """What only some policy losses read; a function may read all of the section."""
    loss, defaults, policy = config.loss, LossConfig(), policy_name(config.loss)
    for setting in sorted({key for known in POLICY_LOSSES.values() for key in known.keys}):
        value, default = getattr(loss, setting), getattr(defaults, setting)
        if value == default:
            continue
        readers = [name for name, known in POLICY_LOSSES.items() if setting in known.keys]
        refuse(
            policy not in readers and not is_function(policy),
            f"loss.{setting} = {str(value).lower()} is for the policy loss {' or '.join(readers)}, got {policy}, which does not read it",
            hint=f"leave loss.{setting} out, or at {str(default).lower()}",
            key=f"loss.{setting}",
        )
    refuse(
        policy == "dppo" and loss.dppo_divergence in ("tv", "topk_tv") and max(loss.dppo_bound, loss.dppo_bound_low) >= 1,
        f"loss.dppo_bound and loss.dppo_bound_low must be below 1 with loss.dppo_divergence = {loss.dppo_divergence}, got "
        f"{loss.dppo_bound} and {loss.dppo_bound_low}: a total variation is never above 1, and nothing would be left out",
        hint="for example 0.2; loss.dppo_divergence = 'kl' has nats",
        key="loss.dppo_bound" if loss.dppo_bound >= 1 else "loss.dppo_bound_low",
    )


def _check_choices(config: Config) -> None:
    """What is decided over a whole optimizer step."""
    loss = config.loss
    refuse(
        loss.clip_cov_low >= loss.clip_cov_high,
        f"loss.clip_cov_low must be below loss.clip_cov_high = {loss.clip_cov_high}, got {loss.clip_cov_low}",
        hint="arXiv 2505.22617 uses 1 and 5",
        key="loss.clip_cov_low",
    )
    still = loss.correction.ratio == "current" or (loss.proximal == "recomputed" and config.trainer.minibatches == 1)
    refuse(
        policy_name(loss) == "kl_cov" and still,
        "loss.policy = kl_cov penalises how far the policy is from the proximal one, which is the current one at every step here: the "
        "penalty would always be 0",
        hint="set trainer.minibatches >= 2, or loss.proximal = 'sampler' with loss.correction.kind = 'none'",
        key="loss.policy",
    )
    refuse(
        loss.top_entropy < 1 and bool(loss.of_logits),
        f"loss.top_entropy says which tokens' policy loss counts, but {OF_LOGITS} takes the place of the policy loss",
        hint="leave loss.top_entropy out",
        key="loss.top_entropy",
    )


def _check_kl(config: Config) -> None:
    kl, name = config.loss.kl, config.loss.advantage
    refuse(
        kl.reward_coef > 0 and kl.loss_coef > 0,
        f"loss.kl.reward_coef = {kl.reward_coef} and loss.kl.loss_coef = {kl.loss_coef} would count the same distance twice",
        hint="keep one of them",
        key="loss.kl.reward_coef",
    )
    refuse(
        kl.reward_coef > 0 and not estimator_of(config.loss).token_rewards,
        f"loss.kl.reward_coef takes the KL off each token's reward, but loss.advantage = {name} knows rewards of whole rollouts only",
        hint=f"use loss.kl.loss_coef, or {', '.join(reading('kl.reward_coef'))}",
        key="loss.kl.reward_coef",
    )
    refuse(
        kl.unbiased and kl.loss_coef == 0,
        "loss.kl.unbiased corrects the KL in the loss, but loss.kl.loss_coef is 0",
        hint="set loss.kl.loss_coef, or leave loss.kl.unbiased out",
        key="loss.kl.unbiased",
    )
    refuse(
        (kl.reward_coef > 0 or kl.loss_coef > 0) and not kl.reference and config.warmup.max_steps > 0,
        "loss.kl holds the policy near the initial one, but the warm-up (warmup.max_steps) leaves that behind on purpose",
        hint="name a directory in loss.kl.reference, for example the policy that an earlier run exported after its warm-up",
        key="loss.kl.reference",
    )
    refuse(
        kl.reference_every > 0 and kl.reward_coef == 0 and kl.loss_coef == 0,
        "loss.kl.reference_every renews the reference, but neither loss.kl.reward_coef nor loss.kl.loss_coef uses it",
        hint="set one of the two coefficients, or leave it out",
        key="loss.kl.reference_every",
    )
    refuse(
        bool(kl.reference) and kl.reward_coef == 0 and kl.loss_coef == 0,
        "loss.kl.reference names a model, but neither loss.kl.reward_coef nor loss.kl.loss_coef uses it",
        hint="set one of the two coefficients, or leave it out",
        key="loss.kl.reference",
    )
    straight = kl.estimator.endswith("+")
    refuse(
        straight and (kl.unbiased or kl.reward_coef > 0),
        f"loss.kl.estimator = {kl.estimator} has a gradient of its own, of no use to "
        f"{'loss.kl.unbiased' if kl.unbiased else 'loss.kl.reward_coef'}",
        hint=f"set loss.kl.estimator = '{kl.estimator.rstrip('+')}'",
        key="loss.kl.estimator",
    )
    refuse(
        kl.varies and kl.reward_coef == 0 and kl.loss_coef == 0,
        "loss.kl.target and loss.kl.decay_steps move the coefficient of the KL, but loss.kl.reward_coef and loss.kl.loss_coef are 0",
        hint="set one of the two coefficients, which is what the first batch has",
        key="loss.kl.target" if kl.target else "loss.kl.decay_steps",
    )
    refuse(
        kl.target > 0 and kl.decay_steps > 0,
        "loss.kl.target adapts the coefficient to the KL, and loss.kl.decay_steps lowers it whatever the KL is",
        hint="keep one of the two",
        key="loss.kl.target",
    )
    refuse(
        kl.varies and bool(config.loss.of_logits),
        f"loss.kl.target and loss.kl.decay_steps move a coefficient that {OF_LOGITS} does not see move",
        hint="leave them out",
        key="loss.kl.target" if kl.target else "loss.kl.decay_steps",
    )
    refuse(
        (kl.gain != KLConfig().gain and not kl.target) or (kl.final_fraction != 0 and not kl.decay_steps),
        "loss.kl.gain belongs to loss.kl.target and loss.kl.final_fraction to loss.kl.decay_steps, which is 0",
        hint="set loss.kl.target or loss.kl.decay_steps",
        key="loss.kl.gain" if kl.gain != KLConfig().gain else "loss.kl.final_fraction",
    )
    refuse(
        kl.loss_coef > 0 and kl.estimator == "k1" and not kl.unbiased and not config.loss.of_logits,
        "loss.kl.estimator = k1 in the loss has the gradient of log pi alone, whatever the reference is, and on fresh tokens 0 on average",
        hint="set loss.kl.estimator = 'k2', 'k3' or 'k1+', or loss.kl.unbiased = true",
        key="loss.kl.estimator",
    )


def _check_critic(config: Config) -> None:
    loss, critic = config.loss, config.loss.critic
    refuse(
        "critic" not in estimator_of(loss).settings and critic != CriticConfig(),
        f"loss.critic is for loss.advantage = ppo, got {loss.advantage}",
        hint="leave the section out, or set loss.advantage = 'ppo'",
        key="loss.critic",
    )
    refuse(
        loss.bootstrap_truncated and config.tasks.overlong != "train",
        f'loss.bootstrap_truncated with tasks.overlong = "{config.tasks.overlong}": no sample that a length limit truncated is trained',
        hint='set tasks.overlong = "train", or leave loss.bootstrap_truncated out',
        key="loss.bootstrap_truncated",
    )
    refuse(
        critic.only_steps >= config.run.steps,
        f"loss.critic.only_steps must be below run.steps = {config.run.steps}, got {critic.only_steps}: the policy would never be trained",
        hint="lower it",
        key="loss.critic.only_steps",
    )
    refuse(
        critic.targets == "gae" and (critic.vtrace_rho, critic.vtrace_c) != (1.0, 1.0),
        "loss.critic.vtrace_rho and vtrace_c are for loss.critic.targets = vtrace, got gae",
        hint="set loss.critic.targets = 'vtrace', or leave them out",
        key="loss.critic.targets",
    )


def _check_models(config: Config) -> None:
    distillation = config.loss.distillation
    refuse(
        (distillation.coef > 0) != bool(distillation.teacher),
        f"loss.distillation.coef and teacher go together, got {distillation.coef} and {distillation.teacher!r}",
        hint="give both or neither",
        key="loss.distillation",
    )


def _check_table(config: Config) -> None:
    """What the backend without torch has no arithmetic for."""
    loss, c = config.loss, config.loss.correction
    missing = {
        "loss.advantage": Role.VALUE in estimator_of(loss).needs,
        "loss.policy": not policy_loss_of(loss).table,
        OF_LOGITS: bool(loss.of_logits),
        "loss.dual_clip": loss.dual_clip > 0,
        "loss.opsm_delta": loss.opsm_delta > 0,
        "loss.top_entropy": loss.top_entropy != 1,
        "loss.entropy_coef": loss.entropy_coef != 0,
        "loss.proximal": loss.proximal == "log_linear",
        "loss.correction.level": c.level != "token" and c.kind != "none",
        "loss.correction.normalize": c.normalize,
        "loss.correction.reject": bool(c.reject),
        "loss.correction.veto": c.veto > 0,
        "loss.correction.mask_staleness": c.mask_staleness > 0,
        "loss.correction.staleness_decay": c.staleness_decay != 1,
        "loss.kl.loss_coef": loss.kl.loss_coef > 0,
        "loss.kl.reward_coef": loss.kl.reward_coef > 0,
        "loss.distillation.coef": loss.distillation.coef > 0,
        "loss.experts.balance_coef": loss.experts.balance_coef > 0,
        "loss.experts.z_coef": loss.experts.z_coef > 0,
    }
    for key, used in missing.items():
        refuse(
            used,
            f"trainer.backend = table cannot do what {key} asks for: it has one policy, ppo's and cispo's losses, and weights of tokens",
            hint=f"leave {key} out, or set trainer.backend = 'torch'",
            key=key,
        )


def _check_correction(config: Config) -> None:
    """Raise ConfigError for the first rule of `loss.correction` and `loss.proximal` that does not hold."""
    _check_proximal(config)
    _check_weights(config)
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


def _check_weights(config: Config) -> None:
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
