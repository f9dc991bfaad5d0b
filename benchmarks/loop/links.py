"""Links between the two halves of a loop without a stream: queues in one process, or a socket between two."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading

import msgspec

from benchmarks.loop.plain import Rollouts
from streamrl.errors import LaunchError
from streamrl.schemas.weights import Manifest

_HEAD = 8
"""Bytes that say how long the frame is."""


class QueueLink:
    """Both halves in one process; the engine's half on `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._groups: queue.SimpleQueue[Rollouts | None] = queue.SimpleQueue()
        self._versions: asyncio.Queue[tuple[Manifest, memoryview] | None] = asyncio.Queue()

    async def put(self, group: Rollouts) -> None:
        """To the training thread."""
        self._groups.put(group)

    def end(self) -> None:
        """No more groups will come: a training thread that waits for one fails."""
        self._groups.put(None)

    def get(self) -> Rollouts:
        """The next group, in order of arrival; see `given`."""
        return given(self._groups.get())

    def offer(self, manifest: Manifest, data: memoryview) -> None:
        """To the engine."""
        self._loop.call_soon_threadsafe(self._versions.put_nowait, (manifest, data))

    def close(self) -> None:
        """Training is over."""
        self._loop.call_soon_threadsafe(self._versions.put_nowait, None)

    async def weights(self) -> tuple[Manifest, memoryview] | None:
        """See `EngineLink.weights`."""
        return await self._versions.get()


class EngineEnd:
    """The engine's end of a socket, on the running event loop."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._loop = asyncio.get_running_loop()
        self._versions: asyncio.Queue[tuple[Manifest, memoryview] | None] = asyncio.Queue()
        threading.Thread(target=self._receive, name="link", daemon=True).start()

    async def put(self, group: Rollouts) -> None:
        """To the training process; a few kilobytes, which a socket takes at once."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # training is over, and `weights` is about to say so
            send(self._connection, self._encoder.encode(group))

    async def weights(self) -> tuple[Manifest, memoryview] | None:
        """See `EngineLink.weights`."""
        return await self._versions.get()

    def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(Manifest)
        while (head := receive(self._connection)) is not None and (data := receive(self._connection)) is not None:
            self._loop.call_soon_threadsafe(self._versions.put_nowait, (decoder.decode(head), memoryview(data)))
        self._loop.call_soon_threadsafe(self._versions.put_nowait, None)


class TrainerEnd:
    """The trainer's end of a socket. Groups are received and decoded by a thread of its own, while the training thread computes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._groups: queue.SimpleQueue[Rollouts | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="link", daemon=True).start()

    def get(self) -> Rollouts:
        """The next group, in order of arrival; see `given`."""
        return given(self._groups.get())

    def offer(self, manifest: Manifest, data: memoryview) -> None:
        """To the engine's process; returns when all bytes are under way."""
        send(self._connection, msgspec.msgpack.encode(manifest))
        send(self._connection, data)

    def close(self) -> None:
        """Training is over."""
        self._connection.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(Rollouts)
        while (frame := receive(self._connection)) is not None:
            self._groups.put(decoder.decode(frame))
        self._groups.put(None)


def given(group: Rollouts | None) -> Rollouts:
    """The group; raises LaunchError when there is none because the sampling half has ended."""
    if group is None:
        raise LaunchError(
            "expected more rollouts, got the end of the half that samples them",
            hint="its error stands above or below",
            ended="sampling half",
        )
    return group


def send(connection: socket.socket, frame: bytes | memoryview) -> None:
    """One frame, whole."""
    connection.sendall(len(frame).to_bytes(_HEAD, "little"))
    connection.sendall(frame)


def receive(connection: socket.socket) -> bytearray | None:
    """One frame, whole; None once the other end is closed."""
    head = _exactly(connection, _HEAD)
    return None if head is None else _exactly(connection, int.from_bytes(head, "little"))


def _exactly(connection: socket.socket, count: int) -> bytearray | None:
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        try:
            got = connection.recv_into(view[done:])
        except ConnectionResetError:
            return None
        if not got:
            return None
        done += got
    return buffer
