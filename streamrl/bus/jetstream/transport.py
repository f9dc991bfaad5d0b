"""The client's socket, read in large pieces.

The client asks its transport for 32 KiB at a time and lets no more than twice that wait, so that a message of a mebibyte costs it dozens of
turns of the event loop, and as many times switching the socket's reading off and on.

Who only looks at a run gets dozens of small messages a second, and waking for each costs several times what is done with it. So its socket
gathers them; what answers a question is read at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

READ_BYTES = 1 << 20
GATHER_S = 0.25
"""So long at most does a message wait in a socket that gathers."""


class WideTransport(TcpTransport):
    """Reads what is there, up to 1 MiB. A client keeps it over reconnects.

    Args:
        awaited: set while somebody waits for an answer, and after a loss until the connection is back.
        gather: whether to leave what comes in the socket for a moment while nobody does.
    """

    def __init__(self, awaited: asyncio.Event, *, gather: bool) -> None:
        super().__init__()
        self._awaited = awaited
        self._gather = gather
        self._drained = True
        """Whether the last read has left nothing."""

    def __bool__(self) -> bool:
        # The client makes a transport of its own in the place of one that is false, as a transport without a socket is.
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        await super().connect(uri, READ_BYTES, connect_timeout)

    async def read(self, buffer_size: int) -> bytes:
        if self._gather and self._drained and not self._awaited.is_set():
            await self._until_gathered()
        data = await super().read(READ_BYTES)
        self._drained = len(data) < READ_BYTES
        return data

    async def _until_gathered(self) -> None:
        assert self._io_writer is not None, "read follows connect"
        socket = self._io_writer.transport
        assert isinstance(socket, asyncio.ReadTransport)
        socket.pause_reading()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._awaited.wait()
        finally:
            socket.resume_reading()
