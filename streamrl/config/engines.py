"""The sections `engine` and `engine.sglang`, and their rules."""

from __future__ import annotations

import difflib
from typing import Any, Literal, NoReturn

from streamrl.config.bounds import NonNegativeFloat, NonNegativeInt, Port, PositiveFloat, PositiveInt, Section
from streamrl.config.registry import ENGINES, EngineKind, EngineName
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


class SglangConfig(Section, frozen=True, kw_only=True):
    """SGLang servers (engine.kind = "sglang"): each engine starts one on loopback and watches it. Tried with SGLang 0.5.17 and 0.5.23."""

    python: str = ""
    """Interpreter of the environment that SGLang is installed in; empty: the one that runs streamrl."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one engine."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """GPUs for the engines, `tensor_parallel` for each in turn; empty: those the engine sees, from the first on."""
    swap: Literal["auto", "flip", "copy", "copy_pinned", "pause"] = "auto"
    """How a version gets in. `flip`: two sets of weights and of graphs, no pause. `copy`: over the served weights between two forward
    passes, from a second set on the GPU. `copy_pinned`: from the host's memory. `pause`: SGLang's own update in a pause, whose versions
    are not exact for every token. `auto`: the first of them that the model and the memory allow."""
    max_gap_ms: NonNegativeFloat = 0.5
    """Staging is paced so that it delays a forward pass by at most about this; 0: as fast as it goes."""
    isolate_prefixes: bool = True
    """A prompt reuses cached prefixes of the version it begins with only, not those that older weights computed."""
    verify: bool = True
    """Check each staged version on the engine's device against its manifest's digest."""
    grammar_backend: Literal["", "xgrammar", "llguidance", "outlines"] = ""
    """What keeps completions within `sampling.json_schema` and `sampling.regex`; its package must be in SGLang's environment. Empty: none,
    requests with a grammar are refused, and the server needs no tokenizer."""
    flags: dict[str, Any] = {}
    """Any other flag of SGLang's launch_server, as `mem_fraction_static = 0.8`; true gives `--flag`, false leaves it out."""
    env: dict[str, str] = {}
    """Environment variables of the server; no secrets, the configuration is stored with the run."""
    quick_start: bool = True
    """Import SGLang in all of a server's processes at the same time, and of its models the one that is served; false: SGLang imports its
    server first, then its other processes, and all models that it knows."""
    start_timeout_s: PositiveFloat = 900.0
    """Time a server gets until it answers; the first start of a model on a GPU compiles kernels for minutes."""
    restarts: NonNegativeInt = 3
    """Times an engine worker starts a new server for one that died, before it ends (and is restarted by its own supervisor)."""
    record_forwards: bool = False
    """Keep the time of every forward pass for `streamrl bench weights`."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """Generation engines started with the run."""

    kind: EngineName = "local"
    """`local`: a transformers model in this package's engine. `table`: a tabular policy without any framework. `sglang`: SGLang servers."""
    workers: NonNegativeInt = 1
    """Engine processes."""
    slots: PositiveInt = 128
    """Sequences decoded at once."""
    threads: PositiveInt = 1
    """CPU threads of one engine."""
    deterministic: bool = False
    """Tokens depend on seed, prompt and weights only, not on what else is being decoded (slower)."""
    host: str = "127.0.0.1"
    """Address the HTTP server listens on; 0.0.0.0: every one of its host."""
    advertise: str = ""
    """Host name or address that producers reach the engines at; empty: engine.host, or this host's address on the way to the bus."""
    port: Port = 0
    """Port of the first engine; 0: any free one."""
    sglang: SglangConfig = SglangConfig()

    @property
    def traits(self) -> EngineKind:
        """What is known of this kind of engine: nobody else asks for it by name."""
        return ENGINES[self.kind]


def check_engine(engine: EngineConfig, evaluators: int, *, placed: bool) -> None:
    """Raise ConfigError for the first rule of `engine.sglang` that does not hold; looks at no file and no GPU.

    Args:
        engine: the section.
        evaluators: engines for evaluations alone.
        placed: Ray gives each engine its GPUs.
    """
    sglang = engine.sglang
    if not engine.traits.server:
        if sglang != SglangConfig():
            _fail("engine.sglang is for engine.kind = sglang, got {}", engine.kind, "set engine.kind, or leave the section out", "kind")
        return
    _check_gpus(sglang, engine.workers + evaluators, placed=placed)
    for name, value in sglang.flags.items():
        _check_flag(name.lstrip("-").replace("-", "_"), name, value, sglang.swap)
    for name in sglang.env:
        if name.startswith("STREAMRL_") or name == "SGLANG_RETURN_ORIGINAL_LOGPROB":
            why = "it is set by the worker" if name.startswith("STREAMRL_") else "log-probs must be those of the distribution drawn from"
            _fail(f"engine.sglang.env may not set {{}}: {why}", name, "leave it out", f"sglang.env.{name}")


def _check_gpus(sglang: SglangConfig, workers: int, *, placed: bool) -> None:
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
    if not sglang.gpus and workers > 1 and sglang.flags.get("device") != "cpu" and not placed:
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
