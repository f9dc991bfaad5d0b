"""HTTP by hand: bytes as nobody's client would send them."""

import asyncio
import contextlib
from collections.abc import Iterable
from urllib.parse import urlsplit


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


def head(path: str, key: str = "", *lines: str, method: str = "POST") -> bytes:
    given = [f"{method} {path} HTTP/1.1", "Host: gateway", "Connection: close", *([f"Authorization: Bearer {key}"] if key else []), *lines]
    return "\r\n".join([*given, "", ""]).encode("latin-1")


def chunked(pieces: Iterable[bytes]) -> Iterable[bytes]:
    """Pieces of a body whose length nobody says."""
    for piece in pieces:
        yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


async def told(url: str, sent: bytes, pieces: Iterable[bytes] = (), *, within_s: float = 30.0) -> bytes:
    reader, writer = await connected(url)
    found = bytearray()
    answer = asyncio.create_task(_all(reader, found))
    try:
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if found or answer.done():
                    break
        async with asyncio.timeout(within_s):
            await answer
        return bytes(found)
    finally:
        answer.cancel()
        writer.close()


async def _all(reader: asyncio.StreamReader, found: bytearray) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            found += piece


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0
