"""The client's socket, read in large pieces.

The client asks its transport for 32 KiB at a time and lets no more than twice that wait, so that a message of a mebibyte costs it dozens of
turns of the event loop, and as many times switching the socket's reading off and on.
"""

from __future__ import annotations

from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

READ_BYTES = 1 << 20


class WideTransport(TcpTransport):
    """Reads what is there, up to 1 MiB. A client keeps it over reconnects."""

    def __bool__(self) -> bool:
        # The client makes a transport of its own in the place of one that is false, as a transport without a socket is.
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        await super().connect(uri, READ_BYTES, connect_timeout)

    async def read(self, buffer_size: int) -> bytes:
        return await super().read(READ_BYTES)
