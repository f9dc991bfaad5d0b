"""The loss, the optimizer, checkpoints and logs of a run."""

from __future__ import annotations

import math
import os.path
import re

from streamrl.bridges.slime.script.draft import Draft
from streamrl.bridges.slime.script.work import is_sft
from streamrl.config.registry import ESTIMATORS, reading

_POLICIES = ("gspo", "cispo")
_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse_sqrt", "WSD": "wsd"}


def write_loss(draft: Draft) -> None:
    """Everything in `loss`, written out where slime's default is another."""
    args = draft.arguments
    kind = args.text("--loss-type")
    draft.put("loss.reduction", "token_mean" if args.on("--calculate-per-token-loss") else "rollout_mean", "--calculate-per-token-loss")
    if kind == "sft_loss":
        return
    name = args.text("--advantage-estimator") or ""
    estimator = "grpo" if name in _POLICIES else name
    if name not in _POLICIES and name not in ESTIMATORS:
        nearest = "loss.distillation (--use-opd) beside another estimator" if "distill" in name else ", ".join(ESTIMATORS)
        return draft.refuse("--advantage-estimator", f"{name} is none here", nearest)
    if "loss.advantage" not in draft.entries:
        draft.put("loss.advantage", estimator, "--advantage-estimator")
    if name in _POLICIES:
        draft.put("loss.policy", name, "--advantage-estimator")
    if kind == "custom_loss":
        draft.put("loss.slime_loss", args.text("--custom-loss-function-path"), "--custom-loss-function-path", "--loss-type")
        if not args.on("--custom-loss-function-path"):
            draft.refuse("--loss-type", "custom_loss without --custom-loss-function-path", "name the function")
    elif kind not in ("policy_loss", None):
        draft.refuse("--loss-type", f"{kind} is none of policy_loss, sft_loss, custom_loss")
    _write_advantages(draft, estimator)
    _write_policy(draft)
    _write_kl(draft)
    _write_correction(draft)
    _write_distillation(draft)


def _write_advantages(draft: Draft, estimator: str) -> None:
    args = draft.arguments
    draft.put("loss.whiten", "on" if args.on("--normalize-advantages") else "off", "--normalize-advantages")
    for flag, key, value in (
        ("--gamma", "gamma", args.number("--gamma")),
        ("--lambd", "gae_lambda", args.number("--lambd")),
        ("--disable-grpo-std-normalization", "normalize_std", False),
        ("--disable-rewards-normalization", "normalize_rewards", False),
    ):
        if args.on(flag) and estimator in reading(key):
            draft.put(f"loss.{key}", value, flag)
        elif args.on(flag):
            draft.say(flag, f"{estimator} does not read it, in slime either")
    if estimator == "ppo":
        draft.put("loss.critic.clip", args.number("--value-clip"), "--value-clip")
        draft.put("loss.critic.only_steps", args.whole("--num-critic-only-steps", least=0), "--num-critic-only-steps")
        rate = args.number("--critic-lr") if args.on("--critic-lr") else args.number("--lr")
        draft.put("loss.critic.learning_rate", rate, "--critic-lr" if args.on("--critic-lr") else "--lr", note="constant")


def _write_policy(draft: Draft) -> None:
    args = draft.arguments
    low = args.number("--eps-clip")
    draft.put("loss.clip_low", low, "--eps-clip")
    high = args.number("--eps-clip-high") if args.on("--eps-clip-high") else low
    draft.put("loss.clip_high", high, "--eps-clip-high" if args.on("--eps-clip-high") else "--eps-clip")
    draft.put("loss.dual_clip", args.number("--eps-clip-c"), "--eps-clip-c")
    draft.put("loss.entropy_coef", args.number("--entropy-coef"), "--entropy-coef")
    if args.on("--use-opsm"):
        draft.put("loss.opsm_delta", args.number("--opsm-delta"), "--opsm-delta", "--use-opsm")
    for flag, key in (("--moe-aux-loss-coeff", "balance_coef"), ("--moe-z-loss-coeff", "z_coef")):
        if args.number(flag):
            draft.put(f"loss.experts.{key}", args.number(flag), flag)


def _write_kl(draft: Draft) -> None:
    args = draft.arguments
    in_loss = (args.number("--kl-loss-coef") or 0.0) if args.on("--use-kl-loss") else 0.0
    in_reward = args.number("--kl-coef") or 0.0
    if args.number("--kl-loss-coef") and not args.on("--use-kl-loss"):
        draft.say("--kl-loss-coef", "without --use-kl-loss it counts for nothing, in slime either")
    if not in_loss and not in_reward:
        for flag in ("--use-kl-loss", "--ref-update-interval"):
            if args.on(flag):
                draft.say(flag, "the coefficient is 0: the KL is not computed, where slime reports it")
        return
    draft.put("loss.kl.estimator", args.text("--kl-loss-type"), "--kl-loss-type")
    if in_loss:
        draft.put("loss.kl.loss_coef", in_loss, "--kl-loss-coef", "--use-kl-loss")
    if in_reward:
        draft.put("loss.kl.reward_coef", in_reward, "--kl-coef")
    if args.on("--use-unbiased-kl"):
        draft.put("loss.kl.unbiased", True, "--use-unbiased-kl")
    draft.put("loss.kl.reference_every", args.whole("--ref-update-interval", least=1), "--ref-update-interval")


def _write_correction(draft: Draft) -> None:
    args = draft.arguments
    if args.on("--use-rollout-logprobs"):
        draft.put("loss.proximal", "sampler", "--use-rollout-logprobs")
    if not args.on("--use-tis"):
        draft.put("loss.correction.kind", "none", "--use-tis")
        for flag in ("--tis-clip", "--tis-clip-low"):
            if args.on(flag):
                draft.say(flag, "without --use-tis it counts for nothing, in slime either")
    else:
        low = args.number("--tis-clip-low") or 0.0
        draft.put("loss.correction.kind", "clip" if low else "truncate", "--use-tis")
        draft.put("loss.correction.high", args.number("--tis-clip"), "--tis-clip")
        if low:
            draft.put("loss.correction.low", low, "--tis-clip-low")
    if args.on("--mask-offpolicy-in-partial-rollout"):
        draft.put("loss.correction.mask_staleness", 1, "--mask-offpolicy-in-partial-rollout")


def _write_distillation(draft: Draft) -> None:
    args = draft.arguments
    if not args.on("--use-opd"):
        return
    if args.text("--opd-type") != "megatron":
        says = f"a teacher of the kind {args.text('--opd-type')} is on a server; here the trainer asks it"
        return draft.refuse("--opd-type", says, "loss.distillation.teacher, a model directory")
    draft.put("loss.distillation.coef", args.number("--opd-kl-coef"), "--opd-kl-coef", "--use-opd")
    draft.put("loss.distillation.teacher", draft.path("--opd-teacher-load"), "--opd-teacher-load", "--opd-type")


def write_optimizer(draft: Draft) -> None:
    """AdamW and the schedule of its rate."""
    args, section = draft.arguments, "trainer.optimizer"
    if (kind := args.text("--optimizer")) != "adam":
        draft.refuse("--optimizer", f"{kind} is none here", "adam")
    rate, style = args.number("--lr"), args.text("--lr-decay-style") or ""
    draft.put(f"{section}.learning_rate", rate, "--lr")
    if style not in _SCHEDULES:
        return draft.refuse("--lr-decay-style", f"{style} is none of {', '.join(_SCHEDULES)}")
    draft.put(f"{section}.schedule", _SCHEDULES[style], "--lr-decay-style")
    if style != "constant":
        draft.put(f"{section}.final_fraction", (args.number("--min-lr") or 0.0) / rate if rate else 0.0, "--min-lr")
    if args.text("--weight-decay-incr-style") != "constant":
        draft.refuse("--weight-decay-incr-style", "the decay of weights is constant", "--weight-decay")
    if args.number("--lr-warmup-init"):
        draft.refuse("--lr-warmup-init", "the rate rises from 0", "leave it out")
    _write_schedule(draft, style)
    for flag, key in (("--weight-decay", "weight_decay"), ("--adam-beta1", "beta1"), ("--adam-beta2", "beta2")):
        draft.put(f"{section}.{key}", args.number(flag), flag)
    draft.put(f"{section}.eps", args.number("--adam-eps"), "--adam-eps")
    draft.put(f"{section}.clip_norm", args.number("--clip-grad"), "--clip-grad")


def _write_schedule(draft: Draft, style: str) -> None:
    """Megatron counts optimizer steps, streamrl batches."""
    args, section = draft.arguments, "trainer.optimizer"
    each, whole = draft.get("trainer.minibatches", 1), draft.get("run.steps", 0)
    lasts = math.ceil((args.whole("--lr-decay-iters", least=1) or 0) / each)
    endless = style in ("constant", "inverse-square-root")
    if args.on("--lr-decay-iters") and not endless:
        draft.put(f"{section}.decay_steps", lasts, "--lr-decay-iters", note=f"{each} steps a batch")
    if args.on("--lr-warmup-fraction"):
        fraction = args.number("--lr-warmup-fraction") or 0.0
        rise, flag = math.ceil(fraction * (lasts or whole)), "--lr-warmup-fraction"
    else:
        rise, flag = math.ceil((args.whole("--lr-warmup-iters", least=0) or 0) / each), "--lr-warmup-iters"
    draft.put(f"{section}.warmup_steps", rise, flag)
    if args.on("--lr-decay-iters") and style == "inverse-square-root":
        draft.say("--lr-decay-iters", "slime's rate is --min-lr behind it; here it goes on to fall, and --min-lr is its least")
    if style == "WSD":
        draft.spoken.add("--lr-wsd-decay-style")
        if (cooling := args.text("--lr-wsd-decay-style")) != "linear":
            draft.say("--lr-wsd-decay-style", f"{cooling} is how the rate falls in slime; here it falls linearly")
    if style == "WSD" and not args.on("--lr-wsd-decay-iters"):
        draft.refuse("--lr-wsd-decay-iters", "is not given with --lr-decay-style WSD", "Megatron needs it, too")
    elif style == "WSD" and (lasts or whole):
        part = min(1.0, math.ceil((args.whole("--lr-wsd-decay-iters", least=0) or 0) / each) / (lasts or whole))
        draft.put(f"{section}.cooldown_fraction", part, "--lr-wsd-decay-iters")
    given = [one for one in ("--lr-warmup-iters", "--lr-decay-iters", "--lr-wsd-decay-iters", "--lr-warmup-fraction") if args.on(one)]
    if each > 1 and (rise or not endless):
        draft.say(
            (given or ["--lr-decay-style"])[0],
            f"the rate moves once a batch, of {each} optimizer steps, and counts are rounded up to batches",
        )


def write_checkpoints(draft: Draft) -> None:
    """Where a run and its checkpoints are."""
    args = draft.arguments
    save, every = draft.path("--save"), args.whole("--save-interval", least=1)
    if save is not None and (name := re.sub(r"[^A-Za-z0-9_-]+", "-", os.path.basename(save.rstrip("/"))).strip("-")):
        draft.put("run.name", name[:128], "--save")
        draft.put("run.dir", os.path.dirname(save.rstrip("/")) or "/", "--save")
    if args.on("--load") and args.on("--save") and (draft.path("--load") or "").rstrip("/") == (save or "").rstrip("/"):
        draft.spoken.add("--load")
    draft.put("trainer.checkpoint_every", every, "--save-interval")
    if args.on("--save-hf") and args.on("--save-interval"):
        draft.put("trainer.export_every", every, "--save-hf", "--save-interval")
    elif args.on("--save-hf"):
        draft.say("--save-hf", "without --save-interval slime saves nothing: no model directory is written")


def write_logs(draft: Draft) -> None:
    """Sinks of metrics."""
    args = draft.arguments
    off = args.text("--wandb-mode") == "disabled"
    sinks = ["tensorboard"] if args.on("--use-tensorboard") else []
    sinks += ["wandb"] if args.on("--use-wandb") and not off else []
    if sinks:
        draft.put("metrics.sinks", sinks, "--use-wandb", "--use-tensorboard")
    if "wandb" in sinks:
        draft.put("metrics.wandb.project", args.text("--wandb-project"), "--wandb-project")
        draft.put("metrics.wandb.entity", args.text("--wandb-team"), "--wandb-team")
        draft.put("metrics.wandb.mode", args.text("--wandb-mode"), "--wandb-mode")
    if "tensorboard" in sinks:
        draft.put("metrics.tensorboard.dir", draft.path("--tb-project-name"), "--tb-project-name")
    if args.on("--deterministic-mode"):
        draft.put("run.numerics", "bitwise", "--deterministic-mode")


def check_unset(draft: Draft) -> None:
    """Defaults of Megatron that change what is learned."""
    args = draft.arguments
    for flag in ("--attention-dropout", "--hidden-dropout"):
        if not args.on(flag) and args.text("--train-backend") == "megatron":
            draft.assume(flag, "is not given, and Megatron's default is 0.1; here nothing is dropped")
        draft.spoken.add(flag)
        if args.on(flag) and args.number(flag):
            draft.refuse(flag, f"nothing is dropped here, got {args.text(flag)}", "0")
    rollout = args.number("--rollout-temperature")
    if rollout is not None and rollout <= 0 and not is_sft(draft):
        draft.refuse("--rollout-temperature", f"must be above 0, got {rollout:g}: a greedy token has no log-prob to train on", "1.0")
