"""The weight host of an SGLang server, which stages versions on all its ranks and commits them before the same forward pass.

Weights get in through our plugin where it answers, else by SGLang's own updates, and that is said loudly.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from streamrl.config.engines import EngineConfig
from streamrl.engines.live_swap.control import RankClient, commit_body
from streamrl.engines.live_swap.images import collected
from streamrl.engines.live_swap.messages import VERSIONS_KEY, Committed, Forward, Pace, Prepare, Rank, Stage, Staged, TensorEntry
from streamrl.engines.live_swap.rank_digests import DigestBooks
from streamrl.engines.sglang.client import SglangClient
from streamrl.engines.sglang.server import SglangServer
from streamrl.engines.sglang.stock import StockHost
from streamrl.errors import EngineError, StreamRLError, WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.weights.protocol import Commit, CudaSource, FileSource, Part, Slice, SourceHost

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Staging(msgspec.Struct, frozen=True):
    """How staging a version went: each rank's answer, in the order of ranks, and the version's digest."""

    digest: str
    ranks: tuple[Staged, ...]

    @property
    def took_ms(self) -> float:
        """Of the slowest rank."""
        return max(staged.took_ms for staged in self.ranks)


class ServerHost:
    """Implements `streamrl.weights.protocol.SourceHost` for one server.

    Args:
        directory: of the plugin's sockets.
        size: ranks of the server.
        commit: sends the commit of a version to the server (`control.commit_body`), which hands it to every rank in the same order as
            requests; returns when the server has answered.
        pace: bound on the copying beside a forward pass.
        verify: compare every staged version with its manifest's digests.
        patience_s: how long one step may take before the server counts as dead.
        engine: name of the engine, for errors.
    """

    def __init__(
        self,
        directory: str,
        size: int,
        commit: Callable[[Version], Awaitable[None]],
        *,
        pace: Pace | None = None,
        verify: bool = True,
        patience_s: float = 600.0,
        engine: str = "",
    ) -> None:
        self._engine = engine
        self.clients = [RankClient(directory, rank, patience_s=patience_s) for rank in range(size)]
        self._send_commit = commit
        self.pace = pace if pace is not None else Pace()
        self._verify = verify
        self._books: dict[str, DigestBooks] = {}
        self._layout = ""
        self._turn = asyncio.Lock()
        self._heard = [0] * size
        """Index of the last commit heard of, by rank."""
        self._staged: Version | None = None
        """Staged on all ranks, and its bytes found good."""
        self.serving: Version | None = None
        self.commits: list[tuple[Committed, ...]] = []
        """What the last commits did, on each rank; at most 64."""

    async def hello(self) -> tuple[Rank, ...]:
        """Who is there and how it swaps. Raises EngineError when a rank's plugin does not answer."""
        return tuple(await asyncio.gather(*(client.hello() for client in self.clients)))

    def wants(self, manifest: Manifest) -> Sequence[Slice]:
        return (Slice(0, manifest.nbytes),)

    async def stage(self, manifest: Manifest, parts: AsyncIterator[Part]) -> str:
        async with collected(manifest, parts, engine=self._engine) as source:
            return await self.stage_from(manifest, source)

    async def stage_from(self, manifest: Manifest, source: FileSource | CudaSource) -> str:
        return (await self.stage_timed(manifest, source)).digest

    async def stage_timed(self, manifest: Manifest, source: FileSource | CudaSource) -> Staging:
        """As `stage_from`, with each rank's measurements.

        Raises:
            WeightSyncError: the version does not fit the model, or its bytes do not have its digest; the serving weights are as before.
            EngineError: the server does not answer.
        """
        async with self._turn:
            self._staged = None
            layout = await self._prepared(manifest)
            books = self._books[layout]
            words = books.by_words(manifest)
            request = Stage(version=manifest.version, layout=layout, source=source, pace=self.pace, verify=self._verify, words=words)
            staged = await _all([client.stage(request) for client in self.clients])
            digest = books.check(manifest, [one.digests for one in staged], words=words) if self._verify else manifest.digest
            self._staged = manifest.version
        return Staging(digest, tuple(staged))

    async def commit(self, version: Version) -> Commit:
        async with self._turn:
            if self._staged != version and (self.serving is None or version > self.serving):
                raise WeightSyncError(
                    f"cannot commit {version}: expected it to be staged with its digest, got {self._staged or 'nothing'}",
                    version=str(version),
                    staged=str(self._staged or ""),
                )
            before = await _all([client.commits(heard) for client, heard in zip(self.clients, self._heard, strict=True)])
            for rank, log in enumerate(before):
                self._heard[rank] = max([self._heard[rank], *(done.index for done in log.commits)])
            await self._send_commit(version)
            done = await self._outcome(version)
        self.commits = [*self.commits[-63:], done]
        took_ms = max(one.host_ms for one in done)
        if all(one.committed for one in done):
            self.serving = version
            return Commit(version, committed=True, took_ms=took_ms)
        if any(one.committed for one in done):
            raise EngineError(
                f"expected all ranks to commit {version} or none, got {[one.committed for one in done]}: {[one.reason for one in done]}",
                hint="the ranks serve different weights; restart the server",
            )
        if self.serving is None or version > self.serving:
            raise WeightSyncError(f"cannot commit {version}: {done[0].reason}", version=str(version))
        return Commit(version, committed=False, took_ms=took_ms)

    async def served_digest(self, manifest: Manifest) -> tuple[Version | None, str]:
        """What is served, and its digest as read back from every rank's memory.

        Args:
            manifest: of the version that should be served.

        Raises:
            WeightSyncError: other bytes are served than the manifest's.
        """
        async with self._turn:
            layout = await self._prepared(manifest)
            served = await _all([client.served(layout) for client in self.clients])
        if len({one.version for one in served}) != 1:
            raise EngineError(f"expected all ranks to serve one version, got {[str(one.version) for one in served]}")
        return served[0].version, self._books[layout].check(manifest, [one.digests for one in served])

    async def forwards(self) -> tuple[Forward, ...]:
        """Forward passes of rank 0 since the last call."""
        return (await self.clients[0].forwards()).forwards

    async def close(self) -> None:
        """Let go of the plugin; the server goes on."""
        for client in self.clients:
            await client.close()

    async def _prepared(self, manifest: Manifest) -> str:
        """Key of the manifest's layout, which every rank knows from here on."""
        entries = tuple(TensorEntry(spec.name, spec.dtype, spec.shape, spec.offset, spec.nbytes) for spec in manifest.tensors)
        layout = hashlib.sha256(msgspec.msgpack.encode(entries)).hexdigest()[:16]
        if layout not in self._books:
            if manifest.kind == "adapter":
                raise WeightSyncError(f"expected whole weights, got an adapter in {manifest.version}", hint="publish full versions")
            request = Prepare(layout=layout, tensors=entries)
            prepared = await _all([client.prepare(request) for client in self.clients])
            self._books[layout] = DigestBooks(manifest.tensors, prepared)
            log = logger.info if all(one.recorded for one in prepared) else logger.warning
            log(
                "event=weights_plan recorded=%s why=%s regions=%d seconds=%.2f",
                all(one.recorded for one in prepared),
                prepared[0].why,
                sum(len(one.regions) for one in prepared),
                max(one.took_s for one in prepared),
            )
        return layout

    async def _outcome(self, version: Version) -> tuple[Committed, ...]:
        """What every rank did with the commit just sent; a rank other than the first may still be on its way to it."""
        done: list[Committed] = []
        for rank, client in enumerate(self.clients):
            for _ in range(200):
                new = (await client.commits(self._heard[rank])).commits
                if new:
                    break
                await asyncio.sleep(0.005)
            else:
                raise EngineError(f"rank {rank}: expected it to hear of the commit of {version} within a second")
            self._heard[rank] = new[-1].index
            done.append(new[-1])
        return tuple(done)


async def _all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All results; when one fails, the others are waited for first, so that nobody still reads or writes what the caller lets go of."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


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
