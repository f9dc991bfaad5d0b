"""Answers as server-sent events. A turn is whole, and stored, before its first event leaves: what streams is the answer, not the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"
PIECE_CHARS = 512
"""Of the text in one event."""


async def stream(
    request: web.Request, events: Iterable[dict[str, Any]], *, headers: Mapping[str, str], named: bool = False
) -> web.StreamResponse:
    """Send `events` and the end of the stream; `named`: each goes by its `type`, and the last one is the end."""
    about = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers={**about, **headers})
    await response.prepare(request)
    parts: list[bytes] = []
    for event in events:
        parts.append(b"event: %s\n" % event["type"].encode() if named else b"")
        parts.append(b"data: %s\n\n" % msgspec.json.encode(event))
    body = b"".join(parts) + (b"" if named else DONE)
    await response.write(body)
    await response.write_eof()
    return response


def pieces(text: str) -> list[str]:
    """A text in parts."""
    return [text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS)]
