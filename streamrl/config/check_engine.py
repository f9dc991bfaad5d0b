"""What the section `engine.sglang` may not say."""

from __future__ import annotations

import difflib
from typing import Any, NoReturn

from streamrl.config.engines import SglangConfig
from streamrl.config.tree import Config
from streamrl.errors import ConfigError

OURS: dict[str, str] = {
    "model_path": "model.path",
    "model": "model.path",
    "dtype": "model.dtype",
    "context_length": "model.max_len",
    "max_running_requests": "engine.slots",
    "tp_size": "engine.sglang.tensor_parallel",
    "tensor_parallel_size": "engine.sglang.tensor_parallel",
    "base_gpu_id": "engine.sglang.gpus",
    "enable_deterministic_inference": "engine.deterministic",
    "enable_return_routed_experts": "trainer.routing_replay",
    "host": "engine.host",
    "port": "engine.port",
}
"""Flags that another key of the configuration sets."""
FIXED = ("api_key", "admin_api_key", "config", "skip_tokenizer_init", "incremental_streaming_output", "skip_server_warmup")
"""Flags that every server gets from its worker, or never."""
_ONE = "an engine is one server with one group of schedulers, which all commit before the same forward pass"
_REFUSED: dict[str, tuple[Any, str, str]] = {
    # flag: the value that is no different from leaving it out, why not, what to do instead
    "dp_size": (1, _ONE, "start several engines with engine.workers"),
    "data_parallel_size": (1, _ONE, "start several engines with engine.workers"),
    "enable_dp_attention": (False, _ONE, "start several engines with engine.workers"),
    "pp_size": (1, "weights are committed on all ranks of a pipeline's one stage", "use engine.sglang.tensor_parallel"),
    "pipeline_parallel_size": (1, "weights are committed on all ranks of a pipeline's one stage", "use engine.sglang.tensor_parallel"),
    "nnodes": (1, "an engine lives on one host, and its server on loopback", "attach engines of other hosts with streamrl worker engine"),
    "disaggregation_mode": ("null", "prompt and response would be computed by two servers", "leave it out"),
    "tokenizer_worker_num": (1, "requests are counted and aborted in one front process", "leave it out"),
    "grpc_mode": (False, "streamrl speaks HTTP with the server", "leave it out"),
    "use_ray": (False, "the worker starts and watches the server itself", "leave it out"),
    "grammar_backend": ("none", "it needs a tokenizer in the server, which starts without", "set engine.sglang.grammar_backend"),
    "weight_cache_mode": ("none", "SGLang refuses new weights then", "leave it out"),
}
_PAUSE_ONLY: dict[str, tuple[Any, str]] = {
    "quantization": (None, "published weights are not quantised, the served ones would be, so no digest could be compared"),
    "torchao_config": ("", "published weights are not quantised, the served ones would be, so no digest could be compared"),
    "cpu_offload_gb": (0, "weights move between host and GPU, so there is no fixed second set to stage into"),
    "enable_memory_saver": (False, "memory of weights may be unmapped while the second set is in use"),
}


def check_sglang(config: Config) -> None:
    """Raise ConfigError for the first rule of `engine.sglang` that does not hold; looks at no file and no GPU."""
    sglang = config.engine.sglang
    if config.trainer.routing_replay and config.engine.traits.tabular:
        raise ConfigError(
            f"trainer.routing_replay is for mixtures of experts, got engine.kind = {config.engine.kind}, whose policies are tables",
            hint="leave it out",
            key="trainer.routing_replay",
        )
    if not config.engine.traits.server:
        if sglang != SglangConfig():
            _fail(
                "engine.sglang is for engine.kind = sglang, got {}", config.engine.kind, "set engine.kind, or leave the section out", "kind"
            )
        return
    _check_gpus(config)
    for name, value in sglang.flags.items():
        _check_flag(name.lstrip("-").replace("-", "_"), name, value, sglang.swap)
    for name in sglang.env:
        if name.startswith("STREAMRL_") or name == "SGLANG_RETURN_ORIGINAL_LOGPROB":
            why = "it is set by the worker" if name.startswith("STREAMRL_") else "log-probs must be those of the distribution drawn from"
            _fail(f"engine.sglang.env may not set {{}}: {why}", name, "leave it out", f"sglang.env.{name}")


def _check_gpus(config: Config) -> None:
    sglang, workers = config.engine.sglang, config.engine.workers + config.evaluation.engines
    wanted = sglang.tensor_parallel * max(1, workers)
    if len(set(sglang.gpus)) != len(sglang.gpus):
        _fail("engine.sglang.gpus must be different numbers, got {}", list(sglang.gpus), "name each GPU once", "sglang.gpus")
    if sglang.gpus and len(sglang.gpus) != wanted:
        _fail(
            f"engine.sglang.gpus must name {wanted} GPUs ({max(1, workers)} engines * engine.sglang.tensor_parallel), got {{}}",
            list(sglang.gpus),
            "name tensor_parallel GPUs for each engine",
            "sglang.gpus",
        )
    if not sglang.gpus and workers > 1 and sglang.flags.get("device") != "cpu" and not config.ray.address:
        _fail(
            f"{workers} engines need engine.sglang.gpus, got {{}}: all of them would take the first GPU",
            [],
            f"name {wanted} GPUs, {sglang.tensor_parallel} for each engine",
            "sglang.gpus",
        )


def _check_flag(flag: str, given: str, value: Any, swap: str) -> None:
    key = f"sglang.flags.{given}"
    if flag in OURS:
        _fail(f"engine.sglang.flags may not set {{}}: {OURS[flag]} does", given, f"set {OURS[flag]}", key)
    if flag in FIXED:
        _fail("engine.sglang.flags may not set {}: the worker does", given, "leave it out", key)
    if flag in _REFUSED and value != _REFUSED[flag][0]:
        _, why, instead = _REFUSED[flag]
        _fail(f"engine.sglang.flags.{given} cannot be {{}}: {why}", value, instead, key)
    if flag in _PAUSE_ONLY and swap != "pause" and value not in (_PAUSE_ONLY[flag][0], False):
        why = _PAUSE_ONLY[flag][1]
        _fail(f"engine.sglang.flags.{given} = {{}} needs engine.sglang.swap = pause: {why}", value, "leave it out, or choose pause", key)
    known = (*OURS, *FIXED, *_REFUSED, *_PAUSE_ONLY)
    if flag not in known and (near := difflib.get_close_matches(flag, known, n=1, cutoff=0.9)):
        _fail("engine.sglang.flags has {}, which is no flag of SGLang", given, f"did you mean {near[0]}?", key)
    if not isinstance(value, (bool, int, float, str, list, dict)):
        _fail("a flag of SGLang must be a number, text, true or false, a list or a table, got {}", value, "change it", key)


def _fail(message: str, value: Any, hint: str, key: str) -> NoReturn:
    raise ConfigError(message.format(repr(value)), hint=hint, key=f"engine.{key}")
