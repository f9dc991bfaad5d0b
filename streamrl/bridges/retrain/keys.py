"""Hyperparameters of a retrain configuration as keys of streamrl: `slime_` and `streamrl_` before a name, or nothing.

retrain's slime adapter takes every name behind `slime_` and ignores those without it. Here each name has one meaning, a value has the type
of the key that it becomes, and what has no meaning is refused.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from streamrl.bridges.retrain.placement import Asked, Placed, place
from streamrl.errors import ConfigError

PREFIXES = ("slime_", "streamrl_")
ALIASES: Mapping[str, str] = {
    "learning_rate": "lr",
    "num_iterations": "num_rollout",
    "num_generations": "n_samples_per_prompt",
    "temperature": "rollout_temperature",
    "top_p": "rollout_top_p",
    "top_k": "rollout_top_k",
    "max_completion_length": "rollout_max_response_len",
    "max_tokens_per_generation": "rollout_max_response_len",
    "max_prompt_length": "rollout_max_prompt_len",
    "epsilon": "eps_clip",
    "epsilon_high": "eps_clip_high",
    "beta": "kl_loss_coef",
    "tis_threshold": "tis_clip",
}
"""Other names of the same, those of retrain itself and of its TRL backend."""
DEFAULTS: Mapping[str, Any] = {
    "num_rollout": 10,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "lr": 1e-5,
    "weight_decay": 0.01,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.1,
    "min_lr": 0.0,
    "eps_clip": 0.2,
    "normalize_advantages": True,
    "rollout_temperature": 0.7,
    "rollout_top_p": 0.9,
    "rollout_max_response_len": 256,
    "save_interval": 5,
    "seed": 42,
    "bf16": True,
}
"""retrain's own, of its slime adapter; and slime's lowest rate."""
PROMPT_TOKENS = 1024
"""Longest prompt where none is named; a longer row ends its task with the reason."""
EPISODE_TOKENS = 4096
"""Longest episode where none is named, unless one prompt and one response are longer."""
_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd", "inverse-square-root": "inverse_sqrt"}
_ESTIMATORS = ("grpo", "gspo", "cispo", "ppo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_KLS = ("k1", "k2", "k3", "low_var_kl")


class Translated(msgspec.Struct, frozen=True):
    """What hyperparameters come to."""

    keys: dict[str, Any]
    """By dotted key of the configuration."""
    notes: tuple[str, ...]
    use_environment: bool
    use_rewards: bool


def _number(name: str, value: Any) -> float:
    # A YAML reader takes 1e-5 for a text, since it has no point.
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(name, "a finite number", value)
    return number


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(name, "a whole number of at least 1", value)
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    return value


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise _wrong(name, f"one of {', '.join(choices)}", value)
        return value

    return check


def _plain(name: str, value: Any) -> Any:
    return value


Check = Callable[[str, Any], Any]
PLAIN: Mapping[str, tuple[str, Check]] = {
    "num_rollout": ("run.steps", _whole),
    "seed": ("run.seed", _plain),
    "hf_checkpoint": ("model.path", _text),
    "rollout_max_context_len": ("model.max_len", _whole),
    "prompt_data": ("data.train", _text),
    "input_key": ("data.prompt_key", _text),
    "label_key": ("data.label_key", _text),
    "metadata_key": ("data.metadata_key", _text),
    "rollout_max_prompt_len": ("data.max_prompt_tokens", _whole),
    "rollout_batch_size": ("tasks.batch_tasks", _whole),
    "n_samples_per_prompt": ("tasks.num_rollouts", _whole),
    "rollout_temperature": ("sampling.temperature", _number),
    "rollout_top_p": ("sampling.top_p", _number),
    "rollout_top_k": ("sampling.top_k", _plain),
    "rollout_max_response_len": ("sampling.max_new_tokens", _whole),
    "rollout_stop": ("sampling.stop", _plain),
    "sglang_server_concurrency": ("engine.slots", _whole),
    "lr": ("trainer.optimizer.learning_rate", _number),
    "weight_decay": ("trainer.optimizer.weight_decay", _number),
    "clip_grad": ("trainer.optimizer.clip_norm", _number),
    "adam_beta1": ("trainer.optimizer.beta1", _number),
    "adam_beta2": ("trainer.optimizer.beta2", _number),
    "adam_eps": ("trainer.optimizer.eps", _number),
    "lr_warmup_iters": ("trainer.optimizer.warmup_steps", _plain),
    "lr_decay_iters": ("trainer.optimizer.decay_steps", _whole),
    "max_tokens_per_gpu": ("trainer.micro_tokens", _whole),
    "save_interval": ("trainer.checkpoint_every", _whole),
    "entropy_coef": ("loss.entropy_coef", _number),
    "gamma": ("loss.gamma", _number),
    "lambd": ("loss.gae_lambda", _number),
    "kl_coef": ("loss.kl.reward_coef", _number),
    "kl_loss_coef": ("loss.kl.loss_coef", _number),
    "advantage_estimator": ("loss.advantage", _one_of(*_ESTIMATORS)),
    "kl_loss_type": ("loss.kl.estimator", _one_of(*_KLS)),
}
"""Names that become one key as they are."""
FIXED: Mapping[str, tuple[Any, str]] = {
    "loss_type": ("policy_loss", "supervised runs are of run.kind = 'sft'"),
    "offload": (False, "engines and trainer work at the same time, so neither leaves its memory"),
    "debug_train_only": (False, "train on what is recorded with `streamrl replay` or `streamrl branch`"),
    "debug_rollout_only": (False, "a run without a trainer has no credit; record one and look at it"),
    "sglang_dp_size": (1, "several engines are rollout_num_gpus / rollout_num_gpus_per_engine"),
    "rollout_global_dataset": (True, "rows come from the run's data"),
    "start_rollout_id": (None, "a run goes on where its newest checkpoint is"),
}
"""Names with one value that this is."""
WITHOUT_EFFECT: Mapping[str, str] = {
    "micro_batch_size": "samples are packed by tokens (max_tokens_per_gpu)",
    "use_dynamic_batch_size": "samples are packed by tokens (max_tokens_per_gpu)",
    "gradient_accumulation_steps": "a batch takes as many passes as its tokens need",
    "logging_steps": "every step has its metrics",
}
"""Names that may stand there, and are said to do nothing."""
_PLACED = (
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "sglang_tp_size",
    "colocate",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_parallel",
)
_OTHERS = (
    "global_batch_size",
    "bf16",
    "gradient_checkpointing",
    "eps_clip",
    "eps_clip_high",
    "use_kl_loss",
    "use_tis",
    "tis_clip",
    "tis_clip_low",
    "normalize_advantages",
    "disable_rewards_normalization",
    "disable_grpo_std_normalization",
    "calculate_per_token_loss",
    "use_rollout_logprobs",
    "lr_decay_style",
    "lr_warmup_fraction",
    "min_lr",
    "use_wandb",
    "wandb_project",
    "use_retrain_environment",
    "use_retrain_rewards",
)
KNOWN = (*PLAIN, *FIXED, *WITHOUT_EFFECT, *_PLACED, *_OTHERS)


def translate(hyperparameters: Mapping[str, Any], *, free: int, defaults: Mapping[str, Any] = DEFAULTS) -> Translated:
    """Keys of the configuration for `algorithm.hyperparameters`.

    Args:
        hyperparameters: `lr` or `learning_rate`, `slime_lr`, `streamrl_lr`; `sglang_FLAG` with one of the prefixes, any flag of SGLang's
            server; `streamrl_loss.clip_high`, a key of streamrl's own, which goes before all others.
        free: GPUs of this machine that are free.
        defaults: of names that are not there.

    Raises:
        ConfigError: an unknown name, a value of another type, one thing named twice with two values, or batches that do not divide.
    """
    named, direct = _named(hyperparameters)
    given = {**defaults, **named}
    keys: dict[str, Any] = {}
    notes: list[str] = []
    for name, (value, why) in FIXED.items():
        if name in given and given[name] != value:
            raise ConfigError(f"expected {name} to be {value!r}, got {given[name]!r}: {why}", hint="leave it out", key=name)
    notes += [f"{name} does nothing: {why}" for name, why in WITHOUT_EFFECT.items() if name in named]
    for name, (key, check) in PLAIN.items():
        if name in given:
            keys[key] = check(name, given[name])
    keys |= _batches(given) | _optimizer(given, keys["run.steps"]) | _loss(given) | _memory(given) | _logging(given)
    placed = _placed(given, free)
    keys |= placed.keys
    keys |= {f"engine.sglang.flags.{name.removeprefix('sglang_')}": given[name] for name in given if _is_flag(name)}
    if direct.get("engine.kind", keys["engine.kind"]) != "sglang":
        keys = {key: value for key, value in keys.items() if not key.startswith("engine.sglang.")}
    return Translated(
        keys | direct,
        (*notes, *placed.notes),
        _switch("use_retrain_environment", given.get("use_retrain_environment", True)),
        _switch("use_retrain_rewards", given.get("use_retrain_rewards", True)),
    )


def _named(hyperparameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by slime's name of each, and those of streamrl's own keys."""
    named: dict[str, Any] = {}
    whence: dict[str, str] = {}
    direct: dict[str, Any] = {}
    for written, value in hyperparameters.items():
        prefix = next((prefix for prefix in PREFIXES if str(written).startswith(prefix)), "")
        bare = str(written).removeprefix(prefix)
        if prefix == "streamrl_" and "." in bare:
            direct[bare] = value
            continue
        name = ALIASES.get(bare, bare)
        if name not in KNOWN and not (prefix and _is_flag(name)):
            near = difflib.get_close_matches(bare, (*KNOWN, *ALIASES), n=1)
            raise ConfigError(
                f"expected a known hyperparameter, got {written}",
                hint=f"did you mean {prefix}{near[0]}?"
                if near
                else "docs/retrain.md lists them; streamrl_SECTION.KEY is any key of streamrl",
                key=str(written),
            )
        if name in named and named[name] != value:
            raise ConfigError(
                f"expected one value, got {whence[name]} = {named[name]!r} and {written} = {value!r}, which are the same",
                hint="leave one of them out",
                key=str(written),
            )
        named[name], whence[name] = value, str(written)
    return named, direct


def _is_flag(name: str) -> bool:
    return name.startswith("sglang_") and name not in KNOWN


def _batches(given: Mapping[str, Any]) -> dict[str, Any]:
    """rollout_batch_size * n_samples_per_prompt = global_batch_size * optimizer steps."""
    rollouts = _whole("rollout_batch_size", given["rollout_batch_size"]) * _whole("n_samples_per_prompt", given["n_samples_per_prompt"])
    step = _whole("global_batch_size", given.get("global_batch_size", rollouts))
    if rollouts % step:
        raise ConfigError(
            f"expected global_batch_size to divide rollout_batch_size * n_samples_per_prompt = {rollouts}, got {step}",
            hint="the quotient is the number of optimizer steps a batch",
            key="global_batch_size",
        )
    return {"trainer.minibatches": rollouts // step}


def _optimizer(given: Mapping[str, Any], steps: int) -> dict[str, Any]:
    style = _one_of(*_SCHEDULES)("lr_decay_style", given["lr_decay_style"])
    rate, least = _number("lr", given["lr"]), _number("min_lr", given["min_lr"])
    if not 0 <= least <= rate:
        raise _wrong("min_lr", f"between 0 and lr = {rate:g}", least)
    keys: dict[str, Any] = {"trainer.optimizer.schedule": _SCHEDULES[style]}
    if style != "constant":
        keys["trainer.optimizer.final_fraction"] = least / rate if rate else 0.0
    if "lr_warmup_iters" not in given:
        fraction = _number("lr_warmup_fraction", given["lr_warmup_fraction"])
        if not 0 <= fraction < 1:
            raise _wrong("lr_warmup_fraction", "at least 0 and below 1", fraction)
        # Megatron's: a part of the steps over which the rate falls.
        keys["trainer.optimizer.warmup_steps"] = int(fraction * given.get("lr_decay_iters", steps))
    return keys


def _loss(given: Mapping[str, Any]) -> dict[str, Any]:
    low = _number("eps_clip", given["eps_clip"])
    keys: dict[str, Any] = {"loss.clip_low": low, "loss.clip_high": _number("eps_clip_high", given.get("eps_clip_high", low))}
    if "use_tis" in given:
        keys["loss.correction.kind"] = "clip" if _switch("use_tis", given["use_tis"]) else "none"
    for name, key in (("tis_clip", "loss.correction.high"), ("tis_clip_low", "loss.correction.low")):
        if name in given and given.get("use_tis", False):
            keys[key] = _number(name, given[name])
    if given.get("use_kl_loss") is False and given.get("kl_loss_coef", 0):
        raise _wrong("kl_loss_coef", "0 with use_kl_loss = false", given["kl_loss_coef"])
    if given.get("kl_loss_coef", 0) and "kl_loss_type" not in given:
        keys["loss.kl.estimator"] = "k3"  # slime's own default, k1, has no gradient towards the reference
    keys["loss.whiten"] = "on" if _switch("normalize_advantages", given["normalize_advantages"]) else "off"
    for name, key, value in (
        ("disable_rewards_normalization", "loss.normalize_rewards", False),
        ("disable_grpo_std_normalization", "loss.normalize_std", False),
        ("calculate_per_token_loss", "loss.reduction", "token_mean"),
        ("use_rollout_logprobs", "loss.proximal", "sampler"),
    ):
        if name in given and _switch(name, given[name]):
            keys[key] = value
    return keys


def _memory(given: Mapping[str, Any]) -> dict[str, Any]:
    prompt, response = given.get("rollout_max_prompt_len", PROMPT_TOKENS), given["rollout_max_response_len"]
    keys: dict[str, Any] = {"model.dtype": "bfloat16" if _switch("bf16", given["bf16"]) else "float32", "data.max_prompt_tokens": prompt}
    if "rollout_max_context_len" not in given:
        keys["model.max_len"] = max(EPISODE_TOKENS, prompt + response)
    if "gradient_checkpointing" in given:
        keys["trainer.activations"] = 0 if _switch("gradient_checkpointing", given["gradient_checkpointing"]) else "all"
    return keys


def _logging(given: Mapping[str, Any]) -> dict[str, Any]:
    if not _switch("use_wandb", given.get("use_wandb", False)):
        return {}
    return {"metrics.sinks": ["wandb"]} | ({"metrics.wandb.project": given["wandb_project"]} if "wandb_project" in given else {})


def _placed(given: Mapping[str, Any], free: int) -> Placed:
    count = {name: _whole(name, given[name]) for name in _PLACED if name in given and name not in ("colocate", "sequence_parallel")}
    tensor = count.get("tensor_model_parallel_size", 1)
    if _switch("sequence_parallel", given.get("sequence_parallel", tensor > 1)) != (tensor > 1):
        raise _wrong("sequence_parallel", "true exactly where tensor_model_parallel_size is above 1", given["sequence_parallel"])
    # slime skips sglang_tp_size: the GPUs of an engine are its tensor ranks.
    per_engine, ranks = count.get("rollout_num_gpus_per_engine"), count.get("sglang_tp_size")
    if per_engine and ranks and per_engine != ranks:
        raise _wrong("sglang_tp_size", f"rollout_num_gpus_per_engine = {per_engine}", ranks)
    nodes, per_node = count.get("actor_num_nodes", 1), count.get("actor_num_gpus_per_node")
    return place(
        free,
        Asked(
            trainer=per_node and nodes * per_node,
            nodes=nodes,
            rollout=count.get("rollout_num_gpus"),
            per_engine=per_engine or ranks or 1,
            tensor=tensor,
            pipeline=count.get("pipeline_model_parallel_size", 1),
            colocate=_switch("colocate", given.get("colocate", False)),
        ),
    )


def _wrong(name: str, expected: str, got: Any) -> ConfigError:
    return ConfigError(f"expected {name} to be {expected}, got {got!r}", hint="correct it in algorithm.hyperparameters", key=name)
