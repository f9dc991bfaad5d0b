"""Server-sent events, as SGLang streams an answer: `data: ` and JSON in one line, at the end `data: [DONE]`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

_DATA = b"data: "


async def event_data(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The JSON of each event up to `[DONE]` or the end of the answer; an event may be of any length (routed experts fill megabytes)."""
    parts: list[bytes] = []
    async for data in response.content.iter_any():
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole, parts = b"".join([*parts, line]), []
            if whole == b"data: [DONE]":
                return
            if whole.startswith(_DATA):
                yield whole[len(_DATA) :]
        parts.append(rest)
