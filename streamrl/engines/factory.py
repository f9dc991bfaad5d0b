"""Making the engine a configuration names. torch and transformers are imported only for `local`."""

from __future__ import annotations

from pathlib import Path

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

    Raises:
        ConfigError: `model_dir` does not fit the kind.
        EngineError: the architecture cannot be decoded.
    """
    if config.kind == "table":
        from streamrl.engines.table.engine import TableEngine

        return TableEngine(model_dir, config, engine_id=engine_id, policy=policy, max_len=max_len, delay=delay)
    if config.kind == "sglang":
        from streamrl.engines.sglang.engine import SglangEngine
        from streamrl.engines.sglang.server import SglangServer

        server = SglangServer(config, model_dir, name=engine_id, max_len=max_len, dtype=dtype or "float32", index=index, log_path=log_path)
        return SglangEngine(config, model_dir, server, engine_id=engine_id, policy=policy, max_len=max_len)
    from streamrl.engines.local.engine import LocalEngine

    return LocalEngine(model_dir, config, engine_id=engine_id, policy=policy, max_len=max_len, dtype=dtype)
