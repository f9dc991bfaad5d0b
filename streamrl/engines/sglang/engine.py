"""The `sglang` engine: `Engine` and `WeightHost` over one SGLang server that it starts, watches and ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from streamrl.config.engines import EngineConfig
from streamrl.config.recording import NOTHING, Recording
from streamrl.engines.experts import read_routing
from streamrl.engines.lost import Lost
from streamrl.engines.protocol import Chunk, EngineInfo, GenerateRequest
from streamrl.engines.requests import check_request, check_room
from streamrl.engines.sglang.answers import Style, check_sampling
from streamrl.engines.sglang.counts import Counts
from streamrl.engines.sglang.host import Connected, Host, connect_host
from streamrl.engines.sglang.jobs import Job
from streamrl.engines.sglang.server import SglangServer
from streamrl.engines.texts import Texts
from streamrl.errors import ConfigError, EngineDied, EngineError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.telemetry.clock import StateClock
from streamrl.weights.protocol import Commit, CudaSource, FileSource, Part, Slice


class SglangEngine:
    """Serves nothing until the first commit: requests wait. All methods belong to one event loop.

    Args:
        config: `slots`, `deterministic` and the section `sglang`.
        model_dir: a Hugging Face model directory.
        server: not started, unless `owned` is off.
        engine_id: names this engine in chunks, logs and errors.
        policy: name of the policy it serves.
        max_len: longest sequence in tokens, prompt included.
        owned: start and stop the server with the engine.
        recording: what completions say beside their tokens.

    Raises:
        ConfigError: no vocabulary in the model's configuration.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        server: SglangServer,
        *,
        engine_id: str,
        policy: str,
        max_len: int,
        owned: bool = True,
        recording: Recording = NOTHING,
    ) -> None:
        self.engine_id = engine_id
        self.policy = policy
        self.detail: dict[str, Any] = {}
        """What people may want to know about it, once it runs."""
        self.lost = Lost()
        self.gpus = 0 if config.sglang.flags.get("device") == "cpu" else config.sglang.tensor_parallel
        self.texts = Texts(model_dir, engine=engine_id)
        self._config = config
        self._model_dir = model_dir
        self._server = server
        self._owned = owned
        self._recording = recording
        self._max_len = max_len
        self._vocabulary = _vocabulary(model_dir)
        self._host: Connected | None = None
        self._style: Style | None = None
        self._serving: Version | None = None
        self._swapped = asyncio.Event()
        self._weights_lock = asyncio.Lock()
        self._jobs: dict[str, Job] = {}
        self._left: set[asyncio.Task[None]] = set()
        """Jobs that nobody waits for any more, until the server has dropped them."""
        self._watch: asyncio.Task[None] | None = None
        self._ended: EngineError | None = EngineError(f"engine {engine_id} has not been started", hint="await engine.start() first")
        self._counts = Counts(config.slots)

    def timed(self, clock: StateClock) -> None:
        """See `HostedEngine.timed`."""
        self._counts.clock = clock

    async def start(self) -> None:
        """Start the server and find out how weights get into it; once in an engine's life.

        Raises:
            EngineError: the server does not start, or `engine.sglang.swap` asks for what it cannot do.
        """
        sglang = self._config.sglang
        if self._owned:
            await self._server.start()
        self._host = await connect_host(self._server, self._config, self._model_dir, engine=self.engine_id)
        flags = {name.lstrip("-").replace("-", "_"): value for name, value in sglang.flags.items()}
        routed = bool(flags.get("enable_return_routed_experts"))
        self._style = Style(
            engine=self.engine_id,
            seeded=self._config.deterministic,
            isolate=sglang.isolate_prefixes,
            routing=await asyncio.to_thread(read_routing, self._model_dir) if routed else None,
            stamped=self._host.stamped,
            drafts=bool(flags.get("speculative_algorithm")),
            grammars=bool(sglang.grammar_backend),
            recording=self._recording,
            vocab_size=self._vocabulary,
        )
        self.detail = {"sglang": self._server.version, "server_pid": self._server.pid, "start_s": self._server.start_s, **self._host.detail}
        self._ended = None
        self._watch = asyncio.create_task(self._watching(), name=f"engine-{self.engine_id}")

    async def stop(self) -> None:
        """End the server; open requests fail with EngineError."""
        self._end(EngineError(f"engine {self.engine_id} was stopped", hint="ask another engine"))
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if not self._owned:
            # The server goes on: what is open there is to be dropped.
            for job in self._jobs.values():
                self._leave(job)
            await asyncio.gather(*self._left)
        for job in list(self._jobs.values()):
            await job.drop()
        for task in self._left:
            task.cancel()
        await asyncio.gather(*self._left, return_exceptions=True)
        if self._host is not None:
            await self._host.host.close()
        if self._owned:
            await self._server.stop()

    # Engine

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See `Engine.generate`. Closing the iterator aborts what is unfinished."""
        # An id outside the vocabulary would end the server, not only the request.
        check_request(request, engine=self.engine_id, policy=self.policy, vocab_size=self._vocabulary, max_len=self._max_len)
        decode = await self.texts.load() if request.sampling.stop else None
        if self._ended is not None:
            raise self._ended
        assert self._style is not None
        check_sampling(request, self._style)
        check_room(request, engine=self.engine_id, running=self._jobs, waiting=self._counts.waiting)
        limit = min(request.sampling.max_new_tokens, self._max_len - len(request.prompt_ids))
        job = Job(
            request,
            limit=limit,
            client=self._server.client,
            style=self._style,
            turn=self._turn,
            counts=self._counts,
            lost=self.lost,
            decode=decode,
        )
        self._jobs[request.request_id] = job
        unfinished = len(job.completions)
        try:
            job.start()
            while unfinished:
                item = await job.queue.get()
                if not isinstance(item, Chunk):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            del self._jobs[request.request_id]
            if unfinished:
                job.queue.leave()
                self._leave(job)

    async def abort(self, request_id: str) -> None:
        """End a request, or one completion of it as `<request id>.<index>`; unknown ids are ignored."""
        if job := self._jobs.get(request_id):
            job.cut()
            return
        name, _, index = request_id.rpartition(".")
        if (job := self._jobs.get(name)) and index.isdecimal():
            job.cut(int(index))

    async def info(self) -> EngineInfo:
        """Load and counters now; raises EngineError once the server has ended."""
        if self._ended is not None:
            raise self._ended
        counts, slots = self._counts, self._config.slots
        counts.tick()
        return EngineInfo(
            engine=self.engine_id,
            policy=self.policy,
            serving=self._serving,
            running=min(counts.sent, slots),
            waiting=counts.waiting + max(0, counts.sent - slots),
            slots=slots,
            max_len=self._max_len,
            tokens_total=counts.tokens,
            swaps_total=counts.swaps,
            last_swap_ms=counts.last_swap_ms,
            counters={**counts.totals, **self._server.load},
        )

    # WeightHost

    def wants(self, manifest: Manifest) -> Sequence[Slice]:
        """See `WeightHost.wants`."""
        return self._hosted().wants(manifest)

    async def stage(self, manifest: Manifest, parts: AsyncIterator[Part]) -> str:
        """See `WeightHost.stage`."""
        async with self._weights_lock:
            return await self._hosted().stage(manifest, parts)

    async def stage_from(self, manifest: Manifest, source: FileSource | CudaSource) -> str:
        """See `SourceHost.stage_from`."""
        async with self._weights_lock:
            return await self._hosted().stage_from(manifest, source)

    async def commit(self, version: Version) -> Commit:
        """See `WeightHost.commit`. A failure that leaves mixed weights ends the engine."""
        async with self._weights_lock:
            # To its end even when the caller is cancelled: afterwards the server serves the version, and we must know.
            work = asyncio.ensure_future(self._commit(version))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.gather(work, return_exceptions=True)
                raise

    async def _commit(self, version: Version) -> Commit:
        if self._serving is not None and version <= self._serving:
            return Commit(version, False, 0.0)
        try:
            commit = await self._hosted().commit(version)
        except EngineDied as error:
            self._end(error)
            raise
        if commit.committed:
            self._serving = version
            self._counts.swaps += 1
            self._counts.last_swap_ms = commit.took_ms
            self._counts.moved()
            self._swapped.set()
            self._swapped = asyncio.Event()
        return commit

    def _hosted(self) -> Host:
        if self._ended is not None:
            raise self._ended
        assert self._host is not None
        return self._host.host

    async def _turn(self, least: Version) -> Version:
        """Wait until version `least` or a later one is served; gives the one that is."""
        while self._serving is None or self._serving < least:
            await self._swapped.wait()
        return self._serving

    def _leave(self, job: Job) -> None:
        """Have a job's unfinished completions dropped by the server, in the background."""
        job.cut()
        task = asyncio.create_task(job.over())
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def _watching(self) -> None:
        self._end(await self._server.ended())

    def _end(self, reason: EngineError) -> None:
        if self._ended is not None:
            return
        self._ended = reason
        for job in self._jobs.values():
            job.queue.put_nowait(reason)


def _vocabulary(model_dir: Path) -> int:
    path = model_dir / "config.json"
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"expected a model's configuration in {path}, got: {error}", hint="is it a model directory?") from error
    found = described.get("vocab_size") or described.get("text_config", {}).get("vocab_size")
    if not isinstance(found, int):
        raise ConfigError(f"expected a vocab_size in {path}, got {found!r}", hint="is it the directory of a language model?")
    return found
