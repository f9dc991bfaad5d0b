"""What slime's hooks find in `args`: slime's names for what a run's configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from streamrl.bridges.slime.section import OPTION
from streamrl.config.loss import LossConfig
from streamrl.config.tree import Config

ROUTER_HOST = "router.streamrl.invalid"
"""A name that no resolver knows (RFC 6761): only `post` of the bridge answers there."""
ROUTER_PORT = 80


def loss_flags(loss: LossConfig) -> dict[str, Any]:
    """Slime's names for what the section `loss` says."""
    correction, kl = loss.correction, loss.kl
    return {
        "loss_type": "custom_loss" if loss.slime_loss else "policy_loss",
        "advantage_estimator": loss.policy or loss.advantage,  # slime's gspo and cispo are estimators
        "eps_clip": loss.clip_low,
        "eps_clip_high": loss.clip_high,
        "eps_clip_c": loss.dual_clip or None,
        "value_clip": loss.critic.clip,
        "entropy_coef": loss.entropy_coef,
        "use_kl_loss": kl.loss_coef > 0,
        "kl_loss_coef": kl.loss_coef,
        "kl_loss_type": kl.estimator,
        "use_unbiased_kl": kl.unbiased,
        "kl_coef": kl.reward_coef,
        "use_tis": correction.kind != "none",
        "tis_clip": correction.high,
        "tis_clip_low": correction.low,
        "use_rollout_logprobs": loss.proximal == "sampler",
        "calculate_per_token_loss": loss.reduction == "token_mean",
        "gamma": loss.gamma,
        "lambd": loss.gae_lambda,
        "normalize_advantages": loss.whiten == "on",
    }


def run_flags(config: Config, model_dir: str | Path) -> dict[str, Any]:
    """Slime's names for what the whole configuration says; `model_dir` has the policy's tokenizer. All of it plain values."""
    tasks, sampling, data, evaluation, slime = config.tasks, config.sampling, config.data, config.evaluation, config.slime
    hooks = {name: value or None for name, value in msgspec.structs.asdict(slime).items() if name.endswith("_path")}
    samples = tasks.batch_tasks * tasks.num_rollouts
    found = {
        "hf_checkpoint": str(model_dir),
        "prompt_data": data.train,
        "input_key": data.prompt_key,
        "label_key": data.label_key,
        "metadata_key": data.metadata_key,
        "tool_key": data.tools_key,
        "apply_chat_template": data.chat_template,
        "apply_chat_template_kwargs": dict(data.chat_template_kwargs),
        "num_rollout": config.run.steps,
        "rollout_batch_size": tasks.batch_tasks,
        "n_samples_per_prompt": tasks.num_rollouts,
        "global_batch_size": samples // config.trainer.minibatches,
        "num_steps_per_rollout": config.trainer.minibatches,
        "rollout_seed": config.run.seed,
        "seed": config.run.seed,
        "rollout_max_response_len": sampling.max_new_tokens,
        "rollout_max_context_len": config.model.max_len,
        "rollout_max_prompt_len": data.max_prompt_tokens or None,
        "rollout_temperature": sampling.temperature,
        "rollout_top_p": sampling.top_p,
        "rollout_top_k": sampling.top_k,
        "rollout_stop": list(sampling.stop) or None,
        "rollout_stop_token_ids": list(sampling.stop_token_ids) or None,
        "rollout_skip_special_tokens": False,
        "partial_rollout": False,
        "reward_key": config.reward.key or None,
        "eval_reward_key": config.reward.key or None,
        "group_rm": slime.group_rm,
        "n_samples_per_eval_prompt": evaluation.n,
        "eval_interval": evaluation.every,
        "eval_temperature": evaluation.sampling.temperature,
        "eval_top_p": evaluation.sampling.top_p,
        "eval_max_response_len": evaluation.sampling.max_new_tokens,
        "lr": config.trainer.optimizer.learning_rate,
        "sglang_router_ip": ROUTER_HOST,
        "sglang_router_port": ROUTER_PORT,
        "sglang_server_concurrency": config.producer.concurrency * config.group_size,
        "use_rollout_routing_replay": config.trainer.routing_replay,
        "sglang_speculative_algorithm": None,
        "ci_test": False,
    }
    return {**found, **loss_flags(config.loss), **hooks, **slime.custom_config}


def hook_options(config: Config, model_dir: str | Path) -> dict[str, Any]:
    """Return what a function of slime's form finds in `args` besides its options."""
    return {OPTION: run_flags(config, model_dir)}
