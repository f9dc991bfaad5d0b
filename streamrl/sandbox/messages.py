"""What the caller, the sandbox's server and a program's supervisor say to each other, each message with its length in front."""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from streamrl.sandbox.limits import Limits, Reason

T = TypeVar("T")
_LENGTH_BYTES = 8


class Program(msgspec.Struct, frozen=True):
    """What is to be run."""

    argv: tuple[str, ...]
    env: dict[str, str]
    files: dict[str, bytes]
    stdin: bytes
    limits: Limits
    readable: tuple[str, ...]
    """Paths that it may read, besides the system's."""


class Report(msgspec.Struct, frozen=True):
    """How it ended; with `failed` it was never started."""

    exit_code: int = 0
    reason: Reason = "ok"
    detail: str = ""
    seconds: float = 0.0
    failed: str = ""
    missing: tuple[str, ...] = ()
    """What did not hold (`Isolation.missing`)."""


class Chosen(msgspec.Struct, frozen=True):
    """How this host keeps programs apart from itself."""

    isolation: str
    """`namespaces`, `landlock`, `limits`; empty: there is none that works."""
    missing: tuple[str, ...] = ()
    """What does not hold, in words."""
    why: tuple[str, ...] = ()
    """Why no stronger one was taken."""


def send(to: socket.socket, message: msgspec.Struct) -> None:
    """Raises OSError when nobody hears it."""
    body = msgspec.msgpack.encode(message)
    to.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body)


def receive(source: socket.socket, kind: type[T]) -> T | None:
    """The next message; None at the end.

    Raises:
        OSError: also `TimeoutError`, as the socket's time-out says.
    """
    head = _exactly(source, _LENGTH_BYTES)
    body = None if head is None else _exactly(source, int.from_bytes(head, "big"))
    return None if body is None else msgspec.msgpack.decode(body, type=kind)


def _exactly(source: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = source.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
