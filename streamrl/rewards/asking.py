"""A server that is asked for a reward: POST, JSON in and out, with a pool of connections, tries, and limits of time and size."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from streamrl.config.reward_kinds import Calls
from streamrl.errors import RewardError

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 1 << 20
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_MOST_S = 30.0
_SHOWN = 200


class _Again(Exception):
    """A try that may be repeated, after at least `wait_s`."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Asking:
    """One address.

    Args:
        url: http or https; redirects are not followed.
        options: limits, and where the key is.
        what: who asks, for messages.
    """

    def __init__(self, url: str, options: Calls, *, what: str) -> None:
        self._url = url
        self._options = options
        self._what = what
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(options.concurrency)
        self._random = random.Random()  # of waits alone

    async def post(self, body: Any, *, where: str) -> Any:
        """The answer's JSON.

        Args:
            body: what JSON can hold.
            where: for messages: which row and rollout.

        Raises:
            RewardError: no usable answer within the tries and the time.
        """
        try:
            data = msgspec.json.encode(body)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self._fail(where, f"the row cannot be sent as JSON: {error}", "give rows plain numbers, texts, lists and tables")
        async with self._slots:  # who waits for a slot loses none of its time
            return await self._tries(data, where)

    async def _tries(self, data: bytes, where: str) -> Any:
        options, now = self._options, asyncio.get_running_loop().time
        end = now() + options.total_s
        tried, why = 0, "no answer"
        while tried < options.attempts and (left := end - now()) > 0:
            tried += 1
            try:
                return await self._try(data, where, min(options.timeout_s, left))
            except _Again as again:
                why = str(again)
                logger.warning("event=reward_call_failed what=%s try=%d url=%s reason=%r", self._what, tried, self._url, why)
                if tried < options.attempts:
                    await asyncio.sleep(min(self._wait_s(tried, again.wait_s), max(0.0, end - now())))
        spent = "" if tried == options.attempts else f" in {options.total_s:g} s (total_s)"
        hint = "is the server up, and fast enough? attempts, timeout_s and total_s are options"
        self._fail(where, f"{why}, tried {tried} times{spent}", hint)

    async def close(self) -> None:
        """Close the connections; another call opens them again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _wait_s(self, tried: int, least_s: float) -> float:
        longest = min(_MOST_S, self._options.backoff_s * 2 ** min(tried - 1, 16))
        return max(min(least_s, _MOST_S), self._random.uniform(longest / 2, longest))

    async def _try(self, data: bytes, where: str, limit_s: float) -> Any:
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._options.concurrency)
            # Cookies of one answer are not sent with the next, and a small answer cannot unfold to a large one.
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        headers |= self._authorization(where)
        none = aiohttp.ClientTimeout(total=None, sock_connect=None)
        call = self._session.post(self._url, data=data, headers=headers, timeout=none, allow_redirects=False)
        try:
            # Its own limits would take the cancellation of whoever waits for this for theirs, where both come at once.
            async with asyncio.timeout(limit_s), call as response:
                found = await _body(response)
                status, waits, place = response.status, response.headers.get("Retry-After", ""), response.headers.get("Location", "")
        except TimeoutError as error:
            raise _Again(f"no answer within {limit_s:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from error
        if found is None:
            self._fail(where, f"an answer of more than {MAX_ANSWER_BYTES} bytes", "a reward is a number or a table of numbers")
        shown = found[:_SHOWN].decode(errors="replace")
        if status in _AGAIN:
            raise _Again(f"status {status}: {shown}", float(waits) if waits.isascii() and waits.isdigit() and len(waits) < 6 else 0.0)
        if 300 <= status < 400:
            self._fail(where, f"status {status}, a redirect to {place[:_SHOWN]!r}", "redirects are not followed; set url to where it leads")
        if status != 200:
            self._fail(where, f"status {status}: {shown}", "the server refuses what it is sent; its answer says why")
        try:
            return msgspec.json.decode(found)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fail(where, f"an answer that is no JSON ({error}): {shown}", "NaN and Infinity are no JSON either")

    def _authorization(self, where: str) -> dict[str, str]:
        name = self._options.token_env
        if not name:
            return {}
        token = os.environ.get(name, "").strip()
        if not token or not token.isascii() or not token.isprintable():
            # Its value is not shown.
            self._fail(where, f"the environment variable {name} holds no key", "set it where producers are started; streamrl doctor looks")
        return {"Authorization": f"Bearer {token}"}

    def _fail(self, where: str, why: str, hint: str) -> NoReturn:
        raise RewardError(f"{self._what} at {self._url} gave no reward for {where}: {why}", hint=hint, url=self._url)


async def _body(response: aiohttp.ClientResponse) -> bytes | None:
    """None for more than is taken; the rest of it is not read."""
    found = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        found += chunk
        if len(found) > MAX_ANSWER_BYTES:
            response.close()
            return None
    return bytes(found)
