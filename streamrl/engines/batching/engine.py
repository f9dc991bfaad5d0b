"""An in-process engine over any `DecodeModel`: the asyncio side of the decode loop, and the host of its weights."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from streamrl.engines.batching.buffers import WeightBuffers
from streamrl.engines.batching.decode import DecodeLoop, Delivery
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.batching.edits import Editor
from streamrl.engines.batching.model import DecodeModel
from streamrl.engines.grammars import Grammars
from streamrl.engines.lost import Lost
from streamrl.engines.protocol import Chunk, EngineInfo, GenerateRequest
from streamrl.engines.requests import Job, check_request, check_room
from streamrl.engines.texts import StopText, Texts
from streamrl.errors import EngineError, WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.telemetry.clock import StateClock
from streamrl.weights.protocol import Commit, Part, Slice

logger = logging.getLogger(__name__)
T = TypeVar("T")


class BatchingEngine:
    """`streamrl.engines.protocol.Engine` and `streamrl.weights.protocol.WeightHost` in one process.

    All methods belong to the event loop that `start` ran on. No request is served before the first commit: requests wait.

    Args:
        model: the policy.
        slots: completions decoded at once; at most `MAX_WAITING` more wait, further ones are refused.
        engine_id: names this engine in chunks, logs and errors.
        policy: the policy's name; requests for another one are refused.
        model_dir: has the tokenizer, which is read for the first request with stop strings or a grammar.
        grammars: whether requests may have grammars.
        delay: artificial time per token.
    """

    def __init__(
        self,
        model: DecodeModel,
        *,
        slots: int,
        engine_id: str,
        policy: str,
        model_dir: Path,
        grammars: bool = False,
        delay: TokenDelay | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.policy = policy
        self.detail: dict[str, Any] = {}
        self.lost = Lost()
        self.gpus = 0
        self.model = model
        self._slots = slots
        self._texts = Texts(model_dir, engine=engine_id)
        self._grammars: Grammars | None = None
        if grammars:
            self._grammars = Grammars(self._texts, vocab_size=model.vocab_size, eos_ids=model.eos_ids, engine=engine_id)
        self._buffers = WeightBuffers(model.layout)
        model.bind(self._buffers.arrays)
        self._serving_index = 0
        self._staged: Version | None = None
        self._weights_lock = asyncio.Lock()
        self._jobs: dict[str, Job] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: EngineError | None = EngineError(f"engine {engine_id} has not been started", hint="await engine.start() first")
        self._decode = DecodeLoop(model, slots=slots, engine=engine_id, deliver=self._deliver, ended=self._on_ended, delay=delay)
        self._gone = asyncio.Event()

    async def start(self) -> None:
        """Start the decode thread; once in an engine's life."""
        if self._loop is not None:
            raise EngineError(f"engine {self.engine_id} has been started before", hint="make a new engine")
        self._loop = asyncio.get_running_loop()
        self._ended = None
        self._thread = threading.Thread(target=self._decode.run, name=f"decode-{self.engine_id}", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the decode thread after its current pass; open requests fail with EngineError."""
        if self._thread is None:
            return
        self._decode.close()
        await self._gone.wait()
        await asyncio.to_thread(self._thread.join)

    def timed(self, clock: StateClock) -> None:
        """See `HostedEngine.timed`."""
        self._decode.clock = clock

    # Engine

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See `Engine.generate`. Closing the iterator aborts what is unfinished."""
        check_request(request, engine=self.engine_id, policy=self.policy, vocab_size=self.model.vocab_size, max_len=self.model.max_len)
        editors = await self._editors(request)
        if self._ended is not None:
            raise self._ended
        check_room(request, engine=self.engine_id, running=self._jobs, waiting=self._decode.waiting)
        job = Job(request, eos_ids=self.model.eos_ids, max_len=self.model.max_len, lost=self.lost, editors=editors)
        self._jobs[request.request_id] = job
        unfinished = len(job.completions)
        try:
            self._decode.submit(job)
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
                self._decode.abort(job)

    async def _editors(self, request: GenerateRequest) -> list[Editor | None]:
        """For each completion what its sampling needs beyond numbers, None where that is nothing."""
        sampling, count = request.sampling, len(request.seeds)
        if not (sampling.stop or sampling.logit_bias or sampling.inexact):
            return [None] * count
        grammar = None
        if sampling.grammar:
            if self._grammars is None:
                name = "json_schema" if sampling.json_schema else "regex"
                raise EngineError(
                    f"engine {self.engine_id} knows no grammars, got sampling.{name} in request {request.request_id!r}",
                    hint="use engine.kind = 'local' or 'sglang', or leave it out",
                    key=f"sampling.{name}",
                )
            grammar = await self._grammars.start(sampling)
        decode = await self._texts.load() if sampling.stop else None
        return [
            Editor(sampling, None if decode is None else StopText(decode, sampling.stop), None if grammar is None else grammar.copy())
            for _ in range(count)
        ]

    async def abort(self, request_id: str) -> None:
        """End a request, or one completion of it as `<request id>.<index>`; unknown ids are ignored."""
        if job := self._jobs.get(request_id):
            self._decode.abort(job)
            return
        name, _, index = request_id.rpartition(".")
        if (job := self._jobs.get(name)) and index.isdecimal():
            self._decode.abort(job, int(index))

    async def info(self) -> EngineInfo:
        """Load and counters now; raises EngineError once decoding has failed."""
        if self._ended is not None:
            raise self._ended
        return EngineInfo(
            engine=self.engine_id,
            policy=self.policy,
            serving=self._decode.serving,
            running=self._decode.running,
            waiting=self._decode.waiting,
            slots=self._slots,
            max_len=self.model.max_len,
            tokens_total=self._decode.tokens_total,
            swaps_total=self._decode.swaps_total,
            last_swap_ms=self._decode.last_swap_ms,
            counters={"engine/saturated_s": self._decode.saturated_s()},
        )

    # WeightHost

    def wants(self, manifest: Manifest) -> Sequence[Slice]:
        """All of a full version; raises WeightSyncError when it does not fit the model."""
        return self._buffers.wants(manifest)

    async def stage(self, manifest: Manifest, parts: AsyncIterator[Part]) -> str:
        """See `WeightHost.stage`; copies and digests in a worker thread while decoding goes on."""
        self._buffers.check(manifest)
        async with self._weights_lock:
            self._staged = None
            idle = 1 - self._serving_index
            written = 0
            async for part in parts:
                written += await _in_background(lambda part=part: self._buffers.write(idle, manifest, part))
            expected = sum(spec.nbytes for spec in manifest.tensors)
            if written != expected:
                raise WeightSyncError(
                    f"expected {expected} bytes of version {manifest.version}, got {written} at engine {self.engine_id}",
                    hint="the transport lost or repeated a part; the next version is taken afresh",
                    expected=expected,
                    got=written,
                )
            digest = await _in_background(lambda: self._buffers.digest(idle))
            if digest != manifest.digest:
                raise WeightSyncError(
                    f"expected digest {manifest.digest} for version {manifest.version}, got {digest} at engine {self.engine_id}",
                    hint="bytes changed on the way; the next version is taken afresh",
                    expected=manifest.digest,
                    got=digest,
                )
            await _in_background(lambda: self.model.prepare(idle))
            self._staged = manifest.version
        return digest

    async def commit(self, version: Version) -> Commit:
        """See `WeightHost.commit`. Raises WeightSyncError when `version` is newer than what is served and is not staged."""
        async with self._weights_lock:
            if self._staged != version:
                if self._decode.serving is not None and version <= self._decode.serving:
                    return Commit(version, False, 0.0)
                raise WeightSyncError(
                    f"expected version {version} to be staged, got {self._staged} at engine {self.engine_id}",
                    hint="stage it first",
                    version=str(version),
                    staged=self._staged,
                )
            if self._ended is not None or self._loop is None:
                raise WeightSyncError(f"engine {self.engine_id} is not running, so version {version} cannot be committed", hint="start it")
            done: asyncio.Future[Commit] = self._loop.create_future()
            idle = 1 - self._serving_index
            self._decode.commit(version, idle, lambda commit: None if done.done() else done.set_result(commit))
            waiter = asyncio.ensure_future(self._gone.wait())
            try:
                # Shielded: a flip under way must be known here before the lock is free, or the next stage writes to served bytes.
                await _settled(asyncio.wait({done, waiter}, return_when=asyncio.FIRST_COMPLETED))
            finally:
                waiter.cancel()
                if done.done() and done.result().committed:
                    self._serving_index, self._staged = idle, None
            if not done.done():
                raise WeightSyncError(f"engine {self.engine_id} ended before version {version} was committed", hint="restart the engine")
            return done.result()

    # Called by the decode thread, and from there on the event loop.

    def _deliver(self, deliveries: list[Delivery]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_call_all, deliveries)
        except RuntimeError:
            # The loop was closed without stop(): nobody is left to be told.
            logger.warning("event=loop_closed engine=%s lost=%d", self.engine_id, len(deliveries))
            self._decode.close()

    def _on_ended(self, reason: EngineError) -> None:
        self._ended = reason
        self._gone.set()
        for job in self._jobs.values():
            job.queue.put_nowait(reason)


def _call_all(deliveries: list[Delivery]) -> None:
    for function, argument in deliveries:
        function(argument)


async def _in_background(function: Callable[[], T]) -> T:
    """Run in a worker thread; a cancelled caller still waits for it, so that no late write meets the next version's."""
    return await _settled(asyncio.to_thread(function))


async def _settled(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even when the caller is cancelled meanwhile; the cancellation is raised then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
