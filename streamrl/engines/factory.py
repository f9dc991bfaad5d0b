"""Making the engine a configuration names. torch and transformers are imported only for `local`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from streamrl.config.recording import NOTHING, Recording
from streamrl.config.registry import EngineName
from streamrl.config.tree import EngineConfig
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.protocol import HostedEngine


def make_engine(
    config: EngineConfig,
    model_dir: Path,
    *,
    engine_id: str,
    policy: str = "policy",
    max_len: int = 256,
    delay: TokenDelay | None = None,
    dtype: str = "",
    index: int = 0,
    log_path: Path | None = None,
    routed: bool = False,
    recording: Recording = NOTHING,
) -> HostedEngine:
    """Build (not start) an engine, which is also the host of its weights.

    Args:
        config: `kind` chooses the adapter.
        model_dir: a Hugging Face model directory, or one with a `table.json`.
        engine_id: names the engine.
        policy: name of the policy it serves.
        max_len: longest sequence in tokens, prompt included.
        delay: artificial time per token; `table` only.
        dtype: type of the published weights; empty: the model's (`local`), float32 (`sglang`).
        index: number of the engine worker, which decides its GPUs; `sglang` only.
        log_path: what a server of its own writes; `sglang` only.
        routed: completions say which experts their tokens went to; `local` and `sglang`.
        recording: what else they say beside their tokens.

    Raises:
        ConfigError: `model_dir` does not fit the kind.
        EngineError: the architecture cannot be decoded.
    """
    factory, named = FACTORIES[config.kind], {"engine_id": engine_id, "policy": policy, "max_len": max_len, "recording": recording}
    return factory(config, model_dir, named, delay=delay, dtype=dtype, index=index, log_path=log_path, routed=routed)


def _local(config: EngineConfig, model_dir: Path, named: dict[str, Any], *, dtype: str, routed: bool, **_: Any) -> HostedEngine:
    from streamrl.engines.local.engine import LocalEngine

    return LocalEngine(model_dir, config, **named, dtype=dtype, routed=routed)


def _table(config: EngineConfig, model_dir: Path, named: dict[str, Any], *, delay: TokenDelay | None, **_: Any) -> HostedEngine:
    from streamrl.engines.table.engine import TableEngine

    return TableEngine(model_dir, config, **named, delay=delay)


def _sglang(
    config: EngineConfig, model_dir: Path, named: dict[str, Any], *, dtype: str, index: int, log_path: Path | None, routed: bool, **_: Any
) -> HostedEngine:
    from streamrl.engines.sglang.engine import SglangEngine
    from streamrl.engines.sglang.server import SglangServer

    if routed:
        config = replace(config, sglang=replace(config.sglang, flags={**config.sglang.flags, "enable_return_routed_experts": True}))
    name, longest, dtype = named["engine_id"], named["max_len"], dtype or "float32"
    server = SglangServer(config, model_dir, name=name, max_len=longest, dtype=dtype, index=index, log_path=log_path)
    return SglangEngine(config, model_dir, server, **named)


FACTORIES: Mapping[EngineName, Callable[..., HostedEngine]] = MappingProxyType({"local": _local, "table": _table, "sglang": _sglang})
"""The code of what `streamrl.config.registry.ENGINES` describes."""
