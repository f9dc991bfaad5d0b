"""HTTP with one SGLang server on this host: JSON in, JSON out, and streamed answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import aiohttp
import msgspec

from streamrl.engines.events import event_data
from streamrl.engines.wire import Result
from streamrl.errors import EngineError, EngineUnavailable

T = TypeVar("T")

_JSON = {"Content-Type": "application/json"}


class SglangClient:
    """Requests to one server; safe to use from any number of tasks of one loop.

    Args:
        address: `http://127.0.0.1:port`.
        key: the server's api key.
        name: of the engine, for errors.
    """

    def __init__(self, address: str, key: str, *, name: str) -> None:
        self.address = address
        self._name = name
        self._headers = {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None
        self._encoder = msgspec.json.Encoder()
        self._result = msgspec.json.Decoder(Result)

    async def close(self) -> None:
        """Break open requests and close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, *, timeout_s: float, expect: type[T]) -> T:
        """GET; raises EngineUnavailable when there is no answer in time, or another one than `expect`."""
        return self._decode(path, await self._call("GET", path, None, timeout_s), expect)

    async def post(self, path: str, body: Any, *, timeout_s: float, expect: type[T]) -> T:
        """POST of JSON; raises as `get` does."""
        return self._decode(path, await self._call("POST", path, self._encoder.encode(body), timeout_s), expect)

    async def command(self, path: str, body: Any, *, timeout_s: float) -> None:
        """POST of JSON whose answer says no more than that it was taken; raises as `get` does."""
        await self._call("POST", path, self._encoder.encode(body), timeout_s)

    async def generate(self, body: Any) -> Result:
        """A whole answer; it may take as long as it takes."""
        data = await self._call("POST", "/generate", self._encoder.encode(body), None)
        return self._decode("/generate", data, Result)

    async def generate_group(self, body: Any) -> list[Result]:
        """Whole answers, of a body with lists of prompts and ids; all of them come once the last has ended."""
        data = await self._call("POST", "/generate", self._encoder.encode(body), None)
        return self._decode("/generate", data, list[Result])

    async def stream(self, body: Any) -> AsyncIterator[Result]:
        """The parts of a streamed answer. Each holds its new tokens only."""
        try:
            async with self._opened().post(self.address + "/generate", data=self._encoder.encode(body), headers=_JSON) as response:
                if response.status != 200:
                    self._check("/generate", response.status, await response.read())
                async for data in event_data(response):
                    self._check("/generate", 200, data)
                    yield self._result.decode(data)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise self._gone("/generate", error) from error

    async def _call(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        try:
            async with self._opened().request(method, self.address + path, data=body, headers=_JSON, timeout=timeout) as response:
                data = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._gone(path, error) from error
        self._check(path, response.status, data)
        return data

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self._session

    def _decode(self, path: str, data: bytes, expect: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=expect)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"expected {expect} from {path} of SGLang at engine {self._name}, got {data[:200]!r}: {error}", hint="see the server's log"
            ) from error

    def _check(self, path: str, status: int, data: bytes) -> None:
        if status == 200 and not data.startswith(b'{"error"'):
            return
        raise (EngineUnavailable if status >= 500 else EngineError)(
            f"expected SGLang at engine {self._name} to answer {path}, got status {status}: {_said(data)}",
            hint="see the server's log",
            status=status,
        )

    def _gone(self, path: str, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(f"SGLang at engine {self._name} did not answer {path}: {error!r}", hint="see the server's log")


def _said(data: bytes) -> str:
    """The words in one of SGLang's several forms of errors."""
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data[:500].decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return str(body)[:500]
