"""ZMQ PUSH and PULL over TCP with structs of lists in MessagePack: how prime-rl hands batches to its trainer. Nothing is stored."""

# pyright: reportMissingImports=false

from __future__ import annotations

import msgspec
import zmq

from benchmarks.bus.lanes import Receiver, Sender
from benchmarks.bus.payload import Plain, plain
from streamrl.errors import BusError
from streamrl.schemas.samples import Sample

HIGH_WATER = 64
"""Messages that each end holds at most; the sender waits above it."""
_WAIT_S = 120.0


class Pusher(Sender):
    """A producer's end."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def form(self, sample: Sample) -> Plain:
        return plain(sample)

    def renumber(self, formed: Plain, task: int) -> Plain:
        return msgspec.structs.replace(formed, task=task)

    def send(self, message: list[Plain]) -> None:
        self._socket.send(self._encoder.encode(message), copy=False)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


class Puller(Receiver):
    """A trainer's end."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(_WAIT_S * 1e3))
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(list[Plain])

    def receive(self) -> tuple[int, int, int]:
        try:
            body = self._socket.recv(copy=False).buffer
        except zmq.Again as error:
            raise BusError(f"bench bus: expected a message on the socket within {_WAIT_S:.0f} s, got none") from error
        samples = self._decoder.decode(body)
        return len(samples), sum(len(sample.tokens) for sample in samples), len(body)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
