"""The wires between a run and its nats-server, and between producers and the engine: TCP proxies that can be cut for one process, and held
at a chosen message.

The server listens on 127.0.0.1 and tells its clients (`bus.advertise`, `engine.advertise`) 127.0.0.2, where the proxy has the same port.
Whose connection is whose, the kernel says.
"""

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Literal

SERVER, PROXY = "127.0.0.1", "127.0.0.2"
CHUNK = 1 << 16
Where = Literal["before", "within", "after"]


def ports_of(pid: int) -> set[int]:
    """Local TCP ports (IPv4) of a process; none when it has ended."""
    inodes: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[9] in inodes}


def free_port() -> int:
    """A port that is free on both addresses, below those that the kernel hands out to connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for host in (SERVER, PROXY):
                stack.enter_context(socket.socket()).bind((host, port))
            return port


class Ambush:
    """Holds the connection of one process at its next message that contains `pattern`."""

    def __init__(self, pid: int, pattern: bytes, where: Where) -> None:
        self.pid = pid
        self.pattern = pattern
        self.where = where
        self.sprung = asyncio.Event()
        self.released = asyncio.Event()

    def cut_at(self, data: bytes) -> int:
        """How many bytes of `data` go through; -1 when the pattern is not in it."""
        start = data.find(self.pattern)
        if start < 0:
            return -1
        return {"before": start, "within": (start + len(data)) // 2, "after": len(data)}[self.where]


class Link:
    def __init__(self, port: int, streams: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self.port = port
        self.streams = streams
        self.answers = asyncio.Event()
        """Cleared while what the server says is held back."""
        self.answers.set()
        self.opened_s = time.time()
        self.answered_s = 0.0
        """When the first bytes of an answer came back, in Unix seconds; 0.0: none have."""

    def abort(self) -> None:
        """Break it at both ends, as a cut cable with a reset does."""
        for stream in self.streams:
            stream.transport.abort()


class Wire:
    def __init__(self, port: int) -> None:
        self.port = port
        self._links: set[Link] = set()
        self._barred: set[int] = set()
        self._all_barred = False
        self._ambush: Ambush | None = None

    @property
    def links(self) -> list[Link]:
        return list(self._links)

    def ambush(self, pid: int, pattern: bytes, where: Where) -> Ambush:
        """Lie in wait for the next such message of the process; release it afterwards."""
        self._ambush = Ambush(pid, pattern, where)
        return self._ambush

    def release(self) -> None:
        """Let what is held go on, if its connection still exists."""
        if self._ambush is not None:
            self._ambush.released.set()
            self._ambush = None

    async def cut(self, pid: int | None, away_s: float) -> None:
        """Break all connections of a process (None: of everyone) and refuse new ones for a while."""
        if pid is None:
            self._all_barred = True
        else:
            self._barred.add(pid)
        ports = set[int]() if pid is None else ports_of(pid)
        for link in list(self._links):
            if pid is None or link.port in ports:
                link.abort()
        await asyncio.sleep(away_s)
        self._all_barred = False
        self._barred.discard(pid or 0)

    def _is_barred(self, port: int) -> bool:
        return self._all_barred or any(port in ports_of(pid) for pid in self._barred)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until either end is gone."""
        port = writer.get_extra_info("peername")[1]
        try:
            if self._is_barred(port):
                raise ConnectionRefusedError
            down, up = await asyncio.open_connection(SERVER, self.port)
        except OSError:
            writer.transport.abort()
            return
        link = Link(port, (writer, up))
        self._links.add(link)
        pumps = [asyncio.create_task(self._upwards(link, reader, up)), asyncio.create_task(self._downwards(link, down, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.discard(link)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            link.abort()

    async def _upwards(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                ambush = self._ambush
                length = -1 if ambush is None or ambush.sprung.is_set() else ambush.cut_at(data)
                if ambush is not None and length >= 0 and link.port in ports_of(ambush.pid):
                    link.answers.clear()
                    writer.write(data[:length])
                    await writer.drain()
                    ambush.sprung.set()
                    await ambush.released.wait()
                    data = data[length:]
                    link.answers.set()
                writer.write(data)
                await writer.drain()

    async def _downwards(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await link.answers.wait()
                link.answered_s = link.answered_s or time.time()
                writer.write(data)
                await writer.drain()


@contextlib.asynccontextmanager
async def open_wire() -> AsyncGenerator[Wire]:
    """A proxy on a free port; the server may come and go behind it."""
    wire = Wire(free_port())
    server = await asyncio.start_server(wire.accept, PROXY, wire.port)
    try:
        yield wire
    finally:
        wire.release()
        server.close()
        await wire.cut(None, 0.0)
