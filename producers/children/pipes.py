"""The parent's ends of what a child writes to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from streamrl.errors import SchemaError
from streamrl.producers.children import frames

logger = logging.getLogger(__name__)


class FrameReader(asyncio.Protocol):
    """Frames of a child, one by one; what is none is as good as its end."""

    def __init__(self, take: Callable[[bytes], None], closed: Callable[[], None]) -> None:
        self._frames = frames.Frames(frames.MAX_BYTES)
        self._take = take
        self._closed = closed

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._take(body)
        except SchemaError as error:
            logger.error("event=child_frame error=%s", error.message)
            self._closed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed()


class LineReader(asyncio.Protocol):
    """What is written to the process's stdout and stderr, line by line; a line without end is cut."""

    _LONGEST = 1 << 16

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            if line:
                self._line(line.decode(errors="replace"))
