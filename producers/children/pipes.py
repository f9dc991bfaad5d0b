"""Ends of what a child and its parent write to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from streamrl.errors import SchemaError
from streamrl.producers.children import frames

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 16


class FrameReader(asyncio.BufferedProtocol):
    """Frames of the other end, one by one; what is none is as good as its end.

    It reads into a buffer of its own: a plain protocol is given new bytes, for which asyncio allocates 256 KiB at each read.

    Args:
        take: a frame's body.
        closed: the other end is.
        max_bytes: largest frame that is taken; 0: any.
    """

    def __init__(self, take: Callable[[bytes], None], closed: Callable[[], None], *, max_bytes: int) -> None:
        self._frames = frames.Frames(max_bytes)
        self._take = take
        self._closed = closed
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for body in self._frames.feed(self._buffer[:nbytes]):
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
