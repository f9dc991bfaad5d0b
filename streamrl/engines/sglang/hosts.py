"""Which way weights get into a server: our plugin where it answers, else SGLang's own updates, and that said loudly."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

import msgspec

from streamrl.config.engines import EngineConfig
from streamrl.engines.live_swap.control import commit_body
from streamrl.engines.live_swap.messages import VERSIONS_KEY, Pace, Rank
from streamrl.engines.sglang.client import SglangClient
from streamrl.engines.sglang.host import ServerHost
from streamrl.engines.sglang.server import SglangServer
from streamrl.engines.sglang.stock import StockHost
from streamrl.errors import EngineError, StreamRLError
from streamrl.schemas.versions import Version
from streamrl.weights.protocol import SourceHost

logger = logging.getLogger(__name__)

COMMIT_S = 120.0


class Host(SourceHost, Protocol):
    """What the engine needs of either way."""

    async def close(self) -> None:
        """Let go of the server, which goes on."""
        ...


class Connected(msgspec.Struct, frozen=True):
    """A server's way."""

    host: Host
    stamped: bool
    """Every token comes with the version that sampled it."""
    detail: dict[str, Any]
    """For people: how it swaps, and why."""


async def connect_host(server: SglangServer, config: EngineConfig, model_dir: Path, *, engine: str) -> Connected:
    """Ask the plugin of every rank how it can swap, and choose.

    Raises:
        EngineError: `engine.sglang.swap` asks for a way that the server does not have.
    """
    wanted = config.sglang.swap
    if wanted == "pause":
        return _stock(server, model_dir, engine=engine, why="engine.sglang.swap = pause")
    host = ServerHost(
        str(server.directory),
        config.sglang.tensor_parallel,
        _committer(server.client),
        pace=Pace(max_gap_ms=config.sglang.max_gap_ms),
        verify=config.sglang.verify,
        engine=engine,
    )
    try:
        ranks = await host.hello()
        problem = problem_of(ranks, wanted) or await _unstamped(server.client)
        if not problem:
            detail = {"swap": ranks[0].swap, "why": ranks[0].why, "buffer_bytes": ranks[0].buffer_nbytes, "graphs_s": ranks[0].graphs_s}
            logger.info("event=sglang_swap engine=%s swap=%s why=%s ranks=%d", engine, ranks[0].swap, ranks[0].why, len(ranks))
            return Connected(host, True, detail)
    except StreamRLError as error:
        problem = f"the plugin does not answer: {error.message}"
    await host.close()
    if wanted != "auto":
        raise EngineError(
            f"expected engine.sglang.swap = {wanted} at engine {engine}: {problem}",
            hint="see the server's log for the plugin's words; with swap = auto the engine takes what works, and says so",
            swap=wanted,
        )
    stock = _stock(server, model_dir, engine=engine, why=problem)
    stock.detail["degraded"] = f"every update pauses it, and versions of what is under way then are guesses (see tasks.inexact): {problem}"
    return stock


def problem_of(ranks: tuple[Rank, ...], wanted: str) -> str:
    """Why the ranks cannot swap as wanted; empty if they can."""
    ways = {rank.swap for rank in ranks}
    if len(ways) > 1:
        return f"its ranks swap in different ways: {', '.join(sorted(ways))}"
    way = ranks[0].swap
    if way == "none":
        return f"its weights cannot be changed by the plugin: {ranks[0].why}"
    return "" if wanted in ("auto", way) else f"it swaps by {way}: {ranks[0].why}"


async def _unstamped(client: SglangClient) -> str:
    body = {"input_ids": [0, 0], "sampling_params": {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}, "return_logprob": True}
    answer = await client.post("/generate", body, timeout_s=COMMIT_S, expect=dict[str, Any])
    got = answer.get("meta_info", {}).get(VERSIONS_KEY)
    return "" if isinstance(got, list) and len(got) == 2 else f"expected a stamp for each of 2 tokens, got {got!r}"


def _committer(client: SglangClient) -> Any:
    async def commit(version: Version) -> None:
        await client.command("/set_internal_state", commit_body(version), timeout_s=COMMIT_S)

    return commit


def _stock(server: SglangServer, model_dir: Path, *, engine: str, why: str) -> Connected:
    logger.warning(
        "event=sglang_pauses engine=%s reason=%s consequence=every update stops all its requests for a while, and the versions of those "
        "under way are not exact for every token",
        engine,
        why,
    )
    return Connected(StockHost(server.client, model_dir, engine=engine), False, {"swap": "pause", "why": why})
