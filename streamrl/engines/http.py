"""The client of a remote engine: anything that speaks the subset in `streamrl.engines.wire`, such as ours and SGLang."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import aiohttp
import msgspec

from streamrl.engines.events import event_data
from streamrl.engines.extras import read_extras
from streamrl.engines.protocol import Chunk, EngineInfo, GenerateRequest
from streamrl.engines.wire import ErrorBody, GenerateBody, MetaInfo, Result, ServerInfo, logprob_problem, params_of, spans_in
from streamrl.errors import EngineError, EngineUnavailable, SchemaError
from streamrl.schemas.samples import LogprobMode
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)
T = TypeVar("T")

FINISH_REASONS = ("stop", "length", "abort")
JSON_HEADERS = {"Content-Type": "application/json"}


class HttpEngine:
    """`Engine` over HTTP.

    A request may wait for minutes, so answers have no time limit; instead the server is asked for its health while any
    request is open, and all of them fail once it has been silent for `silence_s`.

    Args:
        address: `http://host:port`.
        silence_s: how long the server may leave health requests unanswered.
        check_every_s: time between two health requests.
        token: sent with every request, as `Authorization: Bearer`; empty: none.
    """

    def __init__(self, address: str, *, silence_s: float = 20.0, check_every_s: float = 2.0, token: str = "") -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.address = address.rstrip("/")
        self._silence_s = silence_s
        self._check_every_s = check_every_s
        self._session: aiohttp.ClientSession | None = None
        self._open: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._reason = ""
        self._closed = False
        self._encoder = msgspec.json.Encoder()
        self._rows = msgspec.json.Decoder(list[Result])
        self._row = msgspec.json.Decoder(Result)

    async def close(self) -> None:
        """End open requests with EngineError and close the connections; later requests fail the same way."""
        self._closed = True
        try:
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.gather(self._watch, return_exceptions=True)
            self._cancel_open("the client was closed")
        finally:
            # Also when the caller is cancelled while it waits: nobody else knows the connections.
            if self._session is not None:
                await self._session.close()
                self._session = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See `Engine.generate`. Closing the iterator closes the connection, which makes the server abort."""
        if not request.seeds:
            raise EngineError(f"expected one seed per completion, got none in {request.request_id!r}", hint="give at least one seed")
        body = self._body(request)
        if request.stream:
            async for chunk in self._stream(body, len(request.seeds)):
                yield chunk
            return
        for row in await self._watched(self._post(body)):
            _, chunk = self._chunk(row, row.index, 0)
            yield chunk

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        await self._call("POST", "/abort_request", self._encoder.encode({"rid": request_id}))

    async def info(self) -> EngineInfo:
        """See `Engine.info`; raises EngineError when the server does not answer."""
        data = await self._call("GET", "/server_info")
        try:
            info = msgspec.json.decode(data, type=ServerInfo)
            serving = None if info.serving is None else Version.parse(info.serving)
        except (msgspec.DecodeError, SchemaError) as error:
            raise self._unexpected("/server_info", error) from error
        return EngineInfo(
            engine=info.engine or self.address,
            policy=info.policy,
            serving=serving,
            running=info.running,
            waiting=info.waiting,
            slots=info.slots,
            max_len=info.max_len,
            tokens_total=info.tokens_total,
            swaps_total=info.swaps_total,
            last_swap_ms=info.last_swap_ms,
            counters=info.counters,
        )

    def _body(self, request: GenerateRequest) -> bytes:
        prompt = self._encoder.encode([list(request.prompt_ids)] * len(request.seeds))
        body = GenerateBody(
            input_ids=msgspec.Raw(prompt),
            sampling_params=[params_of(request.sampling, seed) for seed in request.seeds],
            rid=[f"{request.request_id}.{index}" for index in range(len(request.seeds))],
            stream=request.stream,
            return_logprob=True,
            policy=request.policy,
            min_version=request.min_version,
            min_epoch=request.min_epoch,
            session=request.session,
            incremental=request.stream,
        )
        return self._encoder.encode(body)

    async def _post(self, body: bytes) -> list[Result]:
        async with self._connected().post(f"{self.address}/generate", data=body, headers=JSON_HEADERS) as response:
            data = await response.read()
            self._check(response.status, data)
        try:
            rows = self._rows.decode(data)
        except msgspec.DecodeError as error:
            raise self._unexpected("/generate", error) from error
        for index, row in enumerate(rows):
            row.index = index
        return rows

    async def _stream(self, body: bytes, count: int) -> AsyncIterator[Chunk]:
        seen = [0] * count
        events: asyncio.Queue[Result | EngineError] = asyncio.Queue(maxsize=1024)
        end = EngineError(
            f"expected {count} whole completions from {self.address}, got the end of the stream",
            hint="see its log",
            address=self.address,
            completions=count,
        )

        async def read() -> None:
            try:
                await self._watched(self._read_events(body, events))
                await events.put(end)
            except EngineError as error:
                await events.put(error)

        reader = asyncio.ensure_future(read())
        unfinished = count
        try:
            while unfinished:
                row = await events.get()
                if isinstance(row, EngineError):
                    raise row
                seen[row.index], chunk = self._chunk(row, row.index, seen[row.index])
                unfinished -= chunk.finish_reason is not None
                yield chunk
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_events(self, body: bytes, events: asyncio.Queue[Result | EngineError]) -> None:
        async with self._connected().post(f"{self.address}/generate", data=body, headers=JSON_HEADERS) as response:
            if response.status != 200:
                self._check(response.status, await response.read())
            async for data in event_data(response):
                await events.put(self._event(data))

    def _event(self, data: bytes) -> Result:
        try:
            if data.startswith(b'{"error"'):
                self._check(400, data)
            return self._row.decode(data)
        except msgspec.DecodeError as error:
            raise self._unexpected("/generate", error) from error

    def _chunk(self, row: Result, index: int, seen: int) -> tuple[int, Chunk]:
        """One result to a chunk; `seen` tokens were given before. A stream may be incremental or repeat all tokens so far."""
        meta = row.meta_info
        total = meta.completion_tokens
        start = seen if len(row.output_ids) == total else 0
        ids = row.output_ids[start:]
        said = meta.output_token_logprobs or []
        fresh = said[len(said) - len(ids) :] if ids else []
        problem = logprob_problem(ids, fresh) or ("" if seen + len(ids) == total else f"{len(ids)} tokens")
        if problem:
            raise EngineError(
                f"expected {total - seen} tokens with their log-probs from {self.address}, got {problem}",
                hint="does the server support return_logprob?",
                address=self.address,
                got=problem,
            )
        try:
            spans = spans_in(meta, seen, total)
            extras = read_extras(meta) if meta.finish_reason is not None else {}
        except SchemaError as error:
            raise EngineError(
                f"expected versions such as 0.17 from {self.address}, got: {error.message}", hint="has it been given weights by streamrl?"
            ) from error
        return total, Chunk(
            completion=index,
            token_ids=tuple(ids),
            logprobs=tuple(value for value, _, _ in fresh if value is not None),  # `logprob_problem` has looked
            spans=spans,
            finish_reason=self._finish_reason(meta),
            logprob_mode=LogprobMode(meta.logprob_mode) if meta.logprob_mode else LogprobMode.TEMPERATURE,
            engine=meta.engine or self.address,
            extras=extras,
        )

    def _finish_reason(self, meta: MetaInfo) -> str | None:
        if meta.finish_reason is None:
            return None
        kind = meta.finish_reason.get("type")
        if kind not in FINISH_REASONS:
            raise EngineError(f"expected a finish reason of {FINISH_REASONS} from {self.address}, got {meta.finish_reason}")
        return kind

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one exchange; fails with EngineError when the connection breaks or the server falls silent."""
        task = asyncio.ensure_future(work)
        self._open.add(task)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._check_health())
        try:
            await asyncio.wait({task})
        finally:
            self._open.discard(task)
            if not task.done():
                task.cancel()
        if task.cancelled():
            raise self._gone(self._reason)
        error = task.exception()
        if isinstance(error, (aiohttp.ClientError, OSError)):
            raise self._gone(repr(error)) from error
        return task.result()

    async def _check_health(self) -> None:
        """Runs while requests are open; cancels them once the server has been silent for too long."""
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        timeout = aiohttp.ClientTimeout(total=self._silence_s)
        while self._open:
            await asyncio.sleep(self._check_every_s)
            try:
                async with self._connected().get(self.address + "/health", timeout=timeout) as response:
                    await response.read()
                answered_s = loop.time()
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                logger.warning("event=engine_silent address=%s seconds=%.1f error=%r", self.address, loop.time() - answered_s, error)
            if loop.time() - answered_s >= self._silence_s:
                self._cancel_open(f"no answer for {self._silence_s:g} s")
                return

    def _cancel_open(self, reason: str) -> None:
        self._reason = reason
        for task in self._open:
            task.cancel()

    async def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self._silence_s)
        try:
            async with self._connected().request(method, self.address + path, data=body, headers=JSON_HEADERS, timeout=timeout) as response:
                data = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._gone(repr(error)) from error
        self._check(response.status, data)
        return data

    def _connected(self) -> aiohttp.ClientSession:
        if self._closed:
            # A session opened now would be closed by nobody.
            raise self._gone("the client was closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self._session

    def _check(self, status: int, data: bytes) -> None:
        if status == 200 and not data.startswith(b'{"error"'):
            return
        try:
            detail = msgspec.json.decode(data, type=ErrorBody).error
        except msgspec.DecodeError:
            raise EngineError(
                f"expected status 200 from {self.address}, got {status}: {data[:200]!r}", hint="see its log", status=status
            ) from None
        raise (EngineUnavailable if status == 503 else EngineError)(detail.message, hint=detail.hint)

    def _gone(self, reason: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"engine at {self.address} has gone: {reason}", hint="is its process running?", address=self.address, reason=reason
        )

    def _unexpected(self, path: str, error: Exception) -> EngineError:
        return EngineError(
            f"expected an answer of SGLang's form from {self.address}{path}, got: {error}", hint="is it an engine?", address=self.address
        )
