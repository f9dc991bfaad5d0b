"""Any engine over HTTP, in SGLang's subset (`streamrl.engines.wire`), and over channels to our own clients."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from streamrl.core.seeds import rollout_seed
from streamrl.engines.channel import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    UPGRADE_REQUIRED,
    Abort,
    Answer,
    Ask,
    Call,
    Leave,
    Outgoing,
    decode_calls,
    decode_request,
)
from streamrl.engines.channel import PATH as CHANNEL
from streamrl.engines.extras import MATCHED, write_extras
from streamrl.engines.protocol import Chunk, Engine, EngineInfo, GenerateRequest
from streamrl.engines.wire import (
    ErrorBody,
    ErrorDetail,
    GenerateBody,
    MetaInfo,
    Result,
    SamplingParams,
    ServerInfo,
    SpanOut,
    extend_spans,
    sampling_of,
)
from streamrl.errors import EngineError, EngineUnavailable, SchemaError, StreamRLError
from streamrl.schemas.tasks import Sampling
from streamrl.system import is_loopback

HINT = "the subset of SGLang's /generate that is understood is in streamrl/engines/wire.py"


class Numbers:
    """Ids that no other request to this server has."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._count = itertools.count()

    def next(self, kind: str = "http") -> str:
        """The next id."""
        return f"{kind}-{self._prefix}-{next(self._count)}"


class Group(msgspec.Struct, frozen=True):
    """One engine request, and the rows of the body that it answers."""

    request: GenerateRequest
    rids: tuple[str, ...]
    """The rows' rids; row k is completion k."""
    first: int
    """Place of the first row in the answer."""
    listed: bool
    """Whether the body asked with a list, so that the answer is one."""


def read_groups(data: bytes, numbers: Numbers, policy: str) -> tuple[list[Group], GenerateBody]:
    """Parse and group; neighbours with equal prompt and sampling share one request. `policy` is asked for unless the body names one.

    Raises:
        SchemaError: the body is not what `GenerateBody` describes.
    """
    try:
        body = msgspec.json.decode(data, type=GenerateBody)
        text = bytes(body.input_ids).strip()
        listed = text[1:].lstrip().startswith(b"[")
        prompts = msgspec.json.decode(text, type=list[tuple[int, ...]]) if listed else [msgspec.json.decode(text, type=tuple[int, ...])]
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"expected a /generate body, got: {error}", hint=HINT) from error
    params = body.sampling_params if body.sampling_params is not None else SamplingParams()
    each = params if isinstance(params, list) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise SchemaError(f"expected sampling_params for {len(prompts)} prompts, got {len(each)}", hint="give one object, or one a prompt")
    rids = _rids(body, len(prompts), numbers)
    groups: list[Group] = []
    first = start = 0
    while start < len(prompts):
        end = start + 1
        key = _without_seed(each[start])
        while each[start].n == 1 and end < len(prompts) and prompts[end] == prompts[start] and _without_seed(each[end]) == key:
            end += 1
        seeds = tuple(seed for one in each[start:end] for seed in _seeds(one))
        names = tuple(rids[start:end]) if each[start].n == 1 else tuple(f"{rids[start]}.{k}" for k in range(each[start].n))
        request = GenerateRequest(
            request_id=numbers.next(),
            prompt_ids=prompts[start],
            sampling=sampling_of(each[start]),
            policy=body.policy or policy,
            seeds=seeds,
            min_version=body.min_version,
            min_epoch=body.min_epoch,
            session=body.session,
            stream=body.stream,
        )
        groups.append(Group(request, names, first, listed))
        first += len(seeds)
        start = end
    if not groups:
        raise SchemaError("expected at least one prompt in input_ids, got none", hint=HINT)
    return groups, body


def _rids(body: GenerateBody, count: int, numbers: Numbers) -> list[str]:
    if body.rid is None:
        name = numbers.next("rid")
        return [f"{name}.{k}" for k in range(count)]
    if isinstance(body.rid, str):
        return [body.rid] if count == 1 else [f"{body.rid}.{k}" for k in range(count)]
    if len(body.rid) != count or len(set(body.rid)) != count:
        raise SchemaError(f"expected {count} different rids for {count} prompts, got {body.rid}", hint="give one rid, or one a prompt")
    return body.rid


def _without_seed(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, sampling_seed=None)


def _seeds(params: SamplingParams) -> tuple[int, ...]:
    if not 1 <= params.n <= 4096:
        raise SchemaError(f"expected sampling_params.n in 1 .. 4096, got {params.n}", hint=HINT)
    if params.n == 1:
        return (secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed,)
    base = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed & 0x7FFFFFFFFFFFFFFF
    return tuple(rollout_seed(base, k) for k in range(params.n))


class Completed:
    """One completion so far."""

    def __init__(self, group: Group, index: int, with_logprobs: bool) -> None:
        self._group = group
        self._index = index
        self._with_logprobs = with_logprobs
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[SpanOut] = []
        self._fresh = 0
        self._last: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        self._fresh = len(self._ids)
        self._ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        extend_spans(self._spans, chunk.spans)
        self._last = chunk

    def result(self, *, incremental: bool) -> Result:
        """All tokens so far, or those of the last chunk only."""
        start = self._fresh if incremental else 0
        ids = self._ids[start:]
        last = self._last
        meta = MetaInfo(
            id=self._group.rids[self._index],
            finish_reason=self._finish_reason(),
            prompt_tokens=len(self._group.request.prompt_ids),
            completion_tokens=len(self._ids),
            output_token_logprobs=[(p, t, None) for p, t in zip(self._logprobs[start:], ids, strict=True)] if self._with_logprobs else None,
            weight_version=self._spans[-1].version if self._spans else None,
            weight_versions=[SpanOut(span.version, span.start, span.end) for span in self._spans],
            logprob_mode=str(last.logprob_mode) if last else "",
            engine=last.engine if last else "",
        )
        if last is not None and last.extras:
            write_extras(last.extras, meta)
        return Result(output_ids=ids, meta_info=meta, index=self._group.first + self._index)

    def _finish_reason(self) -> dict[str, Any] | None:
        if self._last is None or (reason := self._last.finish_reason) is None:
            return None
        if reason == "stop":
            return {"type": "stop", "matched": self._last.extras.get(MATCHED, self._ids[-1])}
        if reason == "length":
            return {"type": "length", "length": len(self._ids)}
        return {"type": reason, "message": "aborted"}


logger = logging.getLogger(__name__)


class Channels:
    """The open channels of one server."""

    def __init__(self, engine: Engine, *, shutdown_s: float, silence_s: float) -> None:
        self._engine = engine
        self._shutdown_s = shutdown_s
        self._silence_s = silence_s
        self._open: set[Channel] = set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """One channel, from its opening to its end; a client that does not offer our protocol is turned away."""
        offered = request.headers.get("Sec-WebSocket-Protocol", "")
        if PROTOCOL not in (name.strip() for name in offered.split(",")):
            said = f"expected a client that speaks {PROTOCOL}, got {offered[:80] or 'none'}: run producers and engines of one version"
            logger.warning("event=channel_refused peer=%s error=%s", request.remote, said)
            return web.Response(status=UPGRADE_REQUIRED, text=said, headers={"Sec-WebSocket-Protocol": PROTOCOL})
        heartbeat_s = self._silence_s * 2 / 3  # a ping, and half of that for its pong: a client that is gone without a word is let go
        socket = web.WebSocketResponse(
            protocols=(PROTOCOL,), timeout=self._shutdown_s, heartbeat=heartbeat_s, max_msg_size=MAX_FRAME_BYTES, compress=False
        )
        await socket.prepare(request)
        channel = Channel(self._engine, socket)
        self._open.add(channel)
        try:
            await channel.run()
        finally:
            self._open.discard(channel)
        return socket

    async def close(self, app: web.Application) -> None:
        """Let open requests end for a while, then end all channels."""
        await asyncio.gather(*(channel.close(self._shutdown_s) for channel in list(self._open)))


class Channel:
    """One client's requests."""

    def __init__(self, engine: Engine, socket: web.WebSocketResponse) -> None:
        self._engine = engine
        self._socket = socket
        self._outgoing = Outgoing(socket.send_bytes)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the client has gone, which aborts what it asked for."""
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    for call in decode_calls(message.data):
                        self._take(call)
        except (msgspec.DecodeError, RecursionError, StreamRLError) as error:
            logger.warning("event=channel_refused error=%s", error)
        finally:
            tasks = [*self._tasks.values(), *self._aborts]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._outgoing.close()

    async def close(self, bound_s: float) -> None:
        """End it once nothing is open, after `bound_s` at the latest."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=bound_s)
        await self._outgoing.close()
        await self._socket.close()

    def _take(self, call: Call) -> None:
        if isinstance(call, Ask):
            task = self._tasks[call.number] = asyncio.create_task(self._answer(call))
            task.add_done_callback(lambda _: self._tasks.pop(call.number, None))
        elif isinstance(call, Leave):
            if (task := self._tasks.get(call.number)) is not None:
                task.cancel()
        else:
            self._aborts.add(task := asyncio.create_task(self._abort(call)))
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, call: Abort) -> None:
        await self._engine.abort(call.request_id)

    async def _answer(self, ask: Ask) -> None:
        kept: list[Chunk] = []
        try:
            request = decode_request(ask.request)
            async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]  # every adapter is an async generator
                async for chunk in chunks:
                    if request.stream:
                        self._outgoing.put(Answer(ask.number, (chunk,)))
                    else:
                        kept.append(chunk)
            answer = Answer(ask.number, tuple(kept), last=True)
        except StreamRLError as error:
            unavailable = isinstance(error, EngineUnavailable)
            answer = Answer(ask.number, last=True, error=ErrorDetail(error.message, error.hint), unavailable=unavailable)
        except (msgspec.DecodeError, RecursionError) as error:
            answer = Answer(ask.number, last=True, error=ErrorDetail(f"expected a request, got one that cannot be read: {error}"))
        except Exception as error:  # told to the client, which would else wait for ever
            logger.exception("event=request_failed")
            answer = Answer(ask.number, last=True, error=ErrorDetail(f"expected an answer of the engine, got {error!r}", "see its log"))
        self._outgoing.put(answer)


T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEALTH = "/health"
_ROUNDS = 4
"""Looks at each connection within `SILENCE_S`."""
MAX_BODY_BYTES = 256 << 20
SHUTDOWN_S = 2.0
"""Seconds that open connections get when the server stops."""
SILENCE_S = 60.0
"""A connection is closed that has brought no whole request for so long, or whose other end does not answer any more."""


class EngineServer:
    """A listening server; made by `serve`."""

    def __init__(self, engine: Engine, *, token: str = "", silence_s: float = SILENCE_S) -> None:
        self._engine = engine
        self._silence_s = silence_s
        self._heard: set[RequestHandler] = set()
        """Connections that have brought a request."""
        self._credentials = f"Bearer {token}".encode() if token else b""
        self._numbers = Numbers()
        self._ids: dict[str, str] = {}
        """rid of every running completion to the engine's `<request id>.<index>`."""
        self._policy = ""
        self._encoder = msgspec.json.Encoder()
        self.runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.address = ""
        """`http://host:port`"""

    async def start(self, host: str, port: int) -> None:
        """Listen; raises EngineError when the engine is not running, the address cannot be had, or it is open to others without a token."""
        if not self._credentials and not is_loopback(host):
            raise EngineError(
                f"expected a token to listen on {host}, where others can ask too, got none", hint="listen on 127.0.0.1", host=host
            )
        self._policy = (await self._engine.info()).policy
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._admit])
        app.router.add_post("/generate", _answering(self._generate))
        app.router.add_post("/abort_request", _answering(self._abort))
        channels = Channels(self._engine, shutdown_s=SHUTDOWN_S, silence_s=self._silence_s)
        app.router.add_get(CHANNEL, channels.serve)
        app.on_shutdown.append(channels.close)
        app.router.add_get(HEALTH, _answering(self._health))
        app.router.add_get("/health_generate", _answering(self._health_generate))
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, _answering(self._server_info))
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, _answering(self._model_info))
        # A handler is cancelled when its client has gone, which closes its generators and so aborts what they run.
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        await self.runner.setup()
        site = web.TCPSite(self.runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self.runner.cleanup()
            raise EngineError(
                f"expected to listen on {host}:{port}, got: {error}",
                hint="set engine.port to 0 for any free port, or to another one",
                host=host,
                port=port,
            ) from error
        bound = self.runner.addresses[0][1]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        self._sweeper = asyncio.create_task(self._sweep(self.runner))
        logger.info("event=engine_listening address=%s", self.address)

    async def stop(self) -> None:
        """Stop listening; open requests are aborted after `SHUTDOWN_S`. The engine runs on."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self.runner is not None:
            await self.runner.cleanup()

    async def _sweep(self, runner: web.AppRunner) -> None:
        """Close connections without a request; in rounds and not by the clock, so that a process that was stopped closes nobody for it."""
        silent: dict[RequestHandler, int] = {}
        while True:
            await asyncio.sleep(self._silence_s / _ROUNDS)
            connections = [] if runner.server is None else runner.server.connections
            self._heard.intersection_update(connections)
            silent = {one: silent.get(one, 0) + 1 for one in connections if one not in self._heard}
            for one in [one for one, rounds in silent.items() if rounds > _ROUNDS]:
                logger.warning("event=connection_closed reason=no_request within_s=%.0f", self._silence_s)
                one.force_close()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn away who does not know the token, on every route but /health, and whose body does not come."""
        self._heard.add(request.protocol)
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path == HEALTH or not self._credentials or hmac.compare_digest(given, self._credentials):
            try:
                async with asyncio.timeout(self._silence_s):
                    await request.read()
            except TimeoutError:
                late = EngineError(f"expected the whole body of {request.path} within {self._silence_s:g} s")
                return _json(msgspec.json.encode(_error_body(late)), 408)
            return await handler(request)
        refusal = EngineError("expected the run's token in the header Authorization", hint="it is in credentials/engine-token of the run")
        logger.warning("event=request_refused path=%s peer=%s", request.path, request.remote)
        return _json(msgspec.json.encode(_error_body(refusal)), 401)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        groups, body = read_groups(await request.read(), self._numbers, self._policy)
        own = {rid: f"{group.request.request_id}.{index}" for group in groups for index, rid in enumerate(group.rids)}
        if taken := own.keys() & self._ids.keys():
            raise SchemaError(f"expected new request ids, got rid {min(taken)!r}, which is running", hint="give every request its own rid")
        self._ids |= own
        try:
            if body.stream:
                return await self._stream(request, groups, body)
            if len(groups) == 1:
                rows = await self._collect(groups[0], body)
            else:
                parts = await _all_or_none([asyncio.ensure_future(self._collect(group, body)) for group in groups])
                rows = [row for part in parts for row in part]
        finally:
            for rid in own:
                del self._ids[rid]
        return _json(self._encoder.encode(rows if groups[0].listed or len(rows) > 1 else rows[0]))

    async def _results(self, group: Group, body: GenerateBody) -> AsyncIterator[Result]:
        """A result after every chunk of the group."""
        completed = [Completed(group, index, body.return_logprob) for index in range(len(group.rids))]
        async with _closing(self._engine.generate(group.request)) as chunks:
            async for chunk in chunks:
                completed[chunk.completion].add(chunk)
                yield completed[chunk.completion].result(incremental=body.incremental)

    async def _collect(self, group: Group, body: GenerateBody) -> list[Result]:
        """The group's whole completions, in their order."""
        completed = [Completed(group, index, body.return_logprob) for index in range(len(group.rids))]
        async with _closing(self._engine.generate(group.request)) as chunks:
            async for chunk in chunks:
                completed[chunk.completion].add(chunk)
        return [one.result(incremental=False) for one in completed]

    async def _stream(self, request: web.Request, groups: list[Group], body: GenerateBody) -> web.StreamResponse:
        items: asyncio.Queue[Result | Exception | None] = asyncio.Queue(maxsize=1024)

        async def run(group: Group) -> None:
            async with _closing(self._results(group, body)) as results:
                async for result in results:
                    await items.put(result)

        async def run_all() -> None:
            try:
                await _all_or_none([asyncio.ensure_future(run(group)) for group in groups])
            except Exception as error:
                # Handed to the reader below, which raises or reports it.
                await items.put(error)
            else:
                await items.put(None)

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        producer = asyncio.ensure_future(run_all())
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, Exception) and not (isinstance(item, StreamRLError) and response.prepared):
                    raise item
                if not response.prepared:
                    await response.prepare(request)
                value = _error_body(item) if isinstance(item, StreamRLError) else item
                await response.write(b"data: " + self._encoder.encode(value) + b"\n\n")
                if value is not item:
                    break
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)
        return response

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        try:
            rid = msgspec.json.decode(await request.read(), type=dict[str, Any]).get("rid")
        except (msgspec.DecodeError, RecursionError) as error:
            raise SchemaError(f"expected a JSON object with rid, got: {error}") from error
        if not isinstance(rid, str) or not rid:
            raise SchemaError(f"expected rid to be a request's id, got {rid!r}", hint='send {"rid": "..."}')
        # A rid that names a batch names its rows `<rid>.0`, `<rid>.1`, ...
        for own in [own for name, own in self._ids.items() if name == rid or name.startswith(rid + ".")]:
            await self._engine.abort(own)
        return _json(b"{}")

    async def _health(self, request: web.Request) -> web.StreamResponse:
        await self._engine.info()
        return _json(b"{}")

    async def _health_generate(self, request: web.Request) -> web.StreamResponse:
        """One token through the whole engine; 503 while it serves no weights."""
        info = await self._engine.info()
        if info.serving is None:
            raise EngineError(f"engine {info.engine} serves no weights yet", hint="wait for its first commit")
        probe = GenerateRequest(
            request_id=self._numbers.next("health"), prompt_ids=(0,), policy=info.policy, sampling=Sampling(max_new_tokens=1)
        )
        async for _ in self._engine.generate(probe):
            pass
        return _json(b"{}")

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        return _json(self._encoder.encode(_server_info(await self._engine.info())))

    async def _model_info(self, request: web.Request) -> web.StreamResponse:
        info = await self._engine.info()
        version = None if info.serving is None else str(info.serving)
        return _json(self._encoder.encode({"model_path": info.policy, "is_generation": True, "weight_version": version}))


async def serve(engine: Engine, host: str = "127.0.0.1", port: int = 0, *, token: str = "", silence_s: float = SILENCE_S) -> EngineServer:
    """Serve `engine` over HTTP; port 0 takes a free one.

    Args:
        engine: running.
        host: address to listen on.
        port: 0 for any free one.
        token: asked of every request but those for /health; without one the server takes anybody's, on loopback only.
        silence_s: how long a connection may be open without a whole request, or without an answer of its other end.

    Raises:
        EngineError: the address cannot be had, or is not on loopback and there is no token.
    """
    server = EngineServer(engine, token=token, silence_s=silence_s)
    await server.start(host, port)
    return server


def _server_info(info: EngineInfo) -> ServerInfo:
    values = msgspec.structs.asdict(info)
    values["serving"] = None if info.serving is None else str(info.serving)
    return ServerInfo(**values)


def _answering(handler: Handler) -> Handler:
    """Turn our errors into JSON: 400 for what the client got wrong, 503 where the engine cannot serve."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except StreamRLError as error:
            unavailable = request.method == "GET" or isinstance(error, EngineUnavailable)
            status = 503 if unavailable else 400
            return _json(msgspec.json.encode(_error_body(error)), status)

    return answer


@asynccontextmanager
async def _closing(items: AsyncIterator[T]) -> AsyncGenerator[AsyncIterator[T]]:
    """Close a generator when its reader stops early; left to the garbage collector, it would abort late or never."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


async def _all_or_none(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Results of all tasks; the first failure, or being cancelled, ends the others."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _error_body(error: StreamRLError) -> ErrorBody:
    return ErrorBody(ErrorDetail(error.message, error.hint))


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
