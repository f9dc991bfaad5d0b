"""Answers as server-sent events. A turn is whole, and stored, before its first event leaves: what streams is the answer, not the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"
PIECE_CHARS = 512
"""Of the text in one event."""


async def stream(request: web.Request, events: Iterable[dict[str, Any]]) -> web.StreamResponse:
    """Send `events` and the end of the stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    await response.prepare(request)
    body = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + DONE
    await response.write(body)
    await response.write_eof()
    return response


def pieces(text: str) -> list[str]:
    """A text in parts."""
    return [text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS)]
