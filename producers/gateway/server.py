"""The gateway's HTTP: who may ask, requests that are too large or no JSON, and which path is whose.

```text
/rl/start_session                             the gateway's key
/rl/set_reward  /rl/end_session               a session's key, as for all below
/v1/chat/completions  /v1/completions         also without /v1, and below /sessions/<key>
/v1/messages  /v1/messages/count_tokens  /v1/responses
/inference/v1/generate  /v1/models
/health                                       nobody's
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from streamrl.errors import BusError, LaunchError, StreamRLError
from streamrl.producers.gateway.anthropic_messages import anthropic_messages, count_tokens
from streamrl.producers.gateway.chat_completions import chat_completions
from streamrl.producers.gateway.completions import completions
from streamrl.producers.gateway.errors import ApiError, later, refused
from streamrl.producers.gateway.fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Fields, ignored
from streamrl.producers.gateway.front import Call
from streamrl.producers.gateway.generate import generate
from streamrl.producers.gateway.guards import BODY_S, LINGER_S, SILENCE_S, VALUE_BYTES, Connections, Held, InHand
from streamrl.producers.gateway.keys import Keys, SessionKey
from streamrl.producers.gateway.responses import responses
from streamrl.producers.gateway.session import AGAIN_S
from streamrl.producers.gateway.sessions import Sessions
from streamrl.producers.gateway.verbs import Verbs
from streamrl.system import bracketed

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Api = Callable[[Call, web.Request], Awaitable[web.StreamResponse]]
APIS: Mapping[str, tuple[Api, Fields]] = {
    "chat/completions": (chat_completions, CHAT),
    "completions": (completions, COMPLETIONS),
    "messages": (anthropic_messages, MESSAGES),
    "messages/count_tokens": (count_tokens, MESSAGES),
    "responses": (responses, RESPONSES),
}
"""APIs and the fields of their requests, by path below `/v1`."""
SHUTDOWN_S = 2.0
MAX_KEY = 256
"""Characters of an `Idempotency-Key`."""


class GatewayServer:
    """A listening gateway.

    Args:
        sessions: that it has.
        verbs: on them.
        keys: of them.
        models: what the policy may be called, the first as it is told.
        max_len: longest sequence in tokens.
        max_body_bytes: of a request.
        max_calls: requests of one session that are in hand at a time.
        wait_s: longest that a call waits for its session to come back.
    """

    def __init__(
        self,
        sessions: Sessions,
        verbs: Verbs,
        keys: Keys,
        *,
        models: tuple[str, ...],
        max_len: int,
        max_body_bytes: int,
        max_calls: int,
        wait_s: float,
    ) -> None:
        self._sessions = sessions
        self._verbs = verbs
        self._keys = keys
        self._models = models
        self._max_len = max_len
        self._max_body_bytes = max_body_bytes
        self._in_hand = InHand(max_body_bytes=max_body_bytes, max_requests=max_calls)
        self._held: dict[RequestHandler, Held] = {}
        """What the request of each connection has in hand."""
        self._wait_s = wait_s
        self._connections: Connections | None = None
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self.address = ""
        """`http://host:port`."""
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; raises LaunchError when the address cannot be had."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._guard])
        app.router.add_get("/health", _health)
        for prefix in ("", "/sessions/{key}"):
            app.router.add_post(f"{prefix}/rl/set_reward", self._set_reward)
            app.router.add_post(f"{prefix}/rl/end_session", self._end)
            app.router.add_post(f"{prefix}/inference/v1/generate", self._calls(generate, {}))
            for version in ("", "/v1"):
                app.router.add_get(f"{prefix}{version}/models", self._list_models)
                for path, (api, fields) in APIS.items():
                    app.router.add_post(f"{prefix}{version}/{path}", self._calls(api, fields))
        app.router.add_post("/rl/start_session", self._start)
        # Its client's going away does not cancel a call: see `streamrl.producers.gateway.session`.
        # What is packed is not unpacked: a kilobyte may become a gigabyte.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=logging.Logger("unsaid", logging.CRITICAL),  # aiohttp writes down lines that it cannot read, with keys in them
            handler_cancellation=False,
            auto_decompress=False,
            keepalive_timeout=SILENCE_S,
            lingering_time=LINGER_S,
            shutdown_timeout=SHUTDOWN_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(self._runner.server)
        try:
            self._listening = await asyncio.get_running_loop().create_server(self._connections, host, port, backlog=1024)
        except OSError as error:
            await self._runner.cleanup()
            raise LaunchError(
                f"expected to listen on {host}:{port}, got: {error}", hint="set gateway.port to 0 for any free port, or to another one"
            ) from error
        self.port = self._listening.sockets[0].getsockname()[1]
        self.address = f"http://{bracketed(host)}:{self.port}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer within bounds: what it takes is in hand until the client has the answer."""
        assert self._connections is not None
        self._connections.begin(request)
        try:
            response = await self._told(request, handler)
            with contextlib.suppress(ConnectionError):  # it has gone
                async with asyncio.timeout(BODY_S):
                    await response.prepare(request)
                    await response.write_eof()
            return response
        except TimeoutError:
            request.protocol.force_close()
            raise
        finally:
            self._connections.end(request)
            if (held := self._held.pop(request.protocol, None)) is not None:
                held.let_go()

    async def _told(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever goes wrong is told in the API's form."""
        try:
            return await handler(request)
        except ApiError as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            refusal = self._too_large()
        except web.HTTPException as error:
            refusal = ApiError(error.status, f"expected one of the gateway's paths, got {request.method} {request.path:.200}")
        except (web.RequestPayloadError, ConnectionError) as error:
            refusal = refused(f"expected the whole request, its client has gone: {type(error).__name__}")
        except RecursionError:
            refusal = refused("expected JSON of some levels, got more")
        except BusError as error:
            refusal = later(f"the run's bus is away: {error.message}", AGAIN_S, code="bus_unavailable")
        except StreamRLError as error:
            refusal = refused(error.message, hint=error.hint)
        except Exception as error:  # the one place of a request that catches everything
            logger.error("event=gateway_failed path=%s error=%r", _path(request), error, exc_info=error)
            refusal = ApiError(500, f"the gateway has failed: {type(error).__name__}", code="internal_error")
        self._sessions.calls.refused(f"{refusal.status} {refusal.message}")
        headers = {"Retry-After": f"{max(1, round(refusal.retry_after_s))}"} if refusal.retry_after_s else {}
        logger.debug("event=call_refused path=%s status=%d code=%s", _path(request), refusal.status, refusal.code)
        told = refusal.anthropic_body() if request.path.endswith(("/messages", "/messages/count_tokens")) else refusal.body()
        return web.Response(body=msgspec.json.encode(told), status=refusal.status, content_type="application/json", headers=headers)

    def _calls(self, api: Api, fields: Fields) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            key = self._session_key(request)
            body = await self._body(request, key)
            model = body.get("model")
            if not isinstance(model, str) or model not in self._models:
                raise ApiError(
                    404,
                    f"expected the model {self._models[0]!r}, got {model!r:.80}",
                    hint="/v1/models lists it",
                    code="model_not_found",
                    param="model",
                )
            session = await self._sessions.find(key, self._wait_s)
            call = Call(
                session=session,
                body=body,
                key=_idempotency(request),
                model=model,
                size=request.content_length or 0,
                ignored=ignored(body, fields),
            )
            response = await api(call, request)
            self._sessions.calls.answered()
            return response

        return handle

    async def _start(self, request: web.Request) -> web.StreamResponse:
        if not any(self._keys.opens(given) for given in _given(request)):
            raise _wrong_key("the gateway's own key, which is in credentials/gateway-key of the run")
        base = f"{request.scheme}://{request.host}"
        return _json(await self._verbs.start(await self._body(request, None, empty=True), _idempotency(request), base))

    async def _set_reward(self, request: web.Request) -> web.StreamResponse:
        key = self._session_key(request)
        return _json(await self._verbs.set_reward(key, await self._body(request, key)))

    async def _end(self, request: web.Request) -> web.StreamResponse:
        key = self._session_key(request)
        return _json(await self._verbs.end(key, await self._body(request, key, empty=True), self._wait_s))

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        if not any(self._keys.opens(given) for given in _given(request)):
            self._session_key(request)
        about = {"object": "model", "created": 0, "owned_by": "streamrl", "max_model_len": self._max_len}
        return _json({"object": "list", "data": [{"id": name} | about for name in self._models]})

    def _session_key(self, request: web.Request) -> SessionKey:
        for given in (request.match_info.get("key", ""), *_given(request), request.headers.get("X-Session-ID", "")):
            if (key := self._keys.read(given)) is not None:
                return key
        raise _wrong_key("a session's key, as /rl/start_session gives it, in the header Authorization or the path /sessions/KEY/v1")

    async def _body(self, request: web.Request, who: SessionKey | None, *, empty: bool = False) -> dict[str, Any]:
        """The table that a request brings; `who` asks, None: who has the gateway's own key."""
        held = self._held[request.protocol] = self._in_hand.take(None if who is None else (who.task, who.rollout))
        try:
            async with asyncio.timeout(BODY_S):
                data = await self._read(request, held)
        except TimeoutError as error:
            raise ApiError(408, f"expected the whole body within {BODY_S:g} s") from error
        if empty and not data.strip():
            return {}
        held.add(VALUE_BYTES * sum(map(data.count, (b",", b"[", b"{"))))
        try:
            body = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise refused(f"expected JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise refused("expected a JSON object", code="invalid_json")
        return cast("dict[str, Any]", body)

    async def _read(self, request: web.Request, held: Held) -> bytes:
        if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise ApiError(
                415, "expected a body as it is, got one that is packed", hint="send no Content-Encoding", param="Content-Encoding"
            )
        if (request.content_length or 0) > self._max_body_bytes:
            raise self._too_large()  # before it is read
        data = bytearray()
        async for piece in request.content.iter_any():
            held.add(len(piece))
            data += piece
            if len(data) > self._max_body_bytes:
                raise self._too_large()
        return bytes(data)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"expected a body of at most {self._max_body_bytes} bytes (gateway.max_body_bytes), got more", code="body_too_large"
        )


async def _health(request: web.Request) -> web.StreamResponse:
    return _json({"status": "ok"})


def _given(request: web.Request) -> list[str]:
    """The keys that a request brings."""
    bearer = request.headers.get("Authorization", "")
    found = [request.headers.get("X-Api-Key", ""), bearer[7:].strip() if bearer[:7].lower() == "bearer " else ""]
    return [key for key in found if key]


def _idempotency(request: web.Request) -> str:
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > MAX_KEY:
        raise refused(f"expected an Idempotency-Key of at most {MAX_KEY} characters, got {len(key)}", param="Idempotency-Key")
    return key


def _wrong_key(what: str) -> ApiError:
    return ApiError(401, f"expected {what}", code="invalid_api_key")


def _path(request: web.Request) -> str:
    """Without a key."""
    with contextlib.suppress(AttributeError):
        resource = request.match_info.route.resource
        return resource.canonical if resource is not None else "unknown"
    return "unknown"


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
