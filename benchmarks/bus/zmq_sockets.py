"""ZMQ PUSH and PULL over TCP with structs of lists in MessagePack: how prime-rl hands batches to its trainer. Nothing is stored."""

# pyright: reportMissingImports=false

from __future__ import annotations

import time

import msgspec
import zmq

from benchmarks.bus.lanes import Counts, Order, Ran
from benchmarks.bus.payload import NUM_PATTERNS, Plain, group, plain
from streamrl.errors import BusError

HIGH_WATER = 64
"""Messages that each end holds at most; the sender waits above it."""
_WAIT_S = 120.0


class Pusher:
    """A producer's end."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._messages: list[list[Plain]] = []

    def prepare(self, order: Order) -> None:
        patterns = [[plain(sample) for sample in group(order.cell, pattern)] for pattern in range(NUM_PATTERNS)]
        self._messages = [
            [msgspec.structs.replace(sample, task=order.first_task + number) for sample in patterns[number % NUM_PATTERNS]]
            for number in range(order.num_tasks)
        ]

    def run(self) -> Ran:
        start_s, cpu_s = time.monotonic(), time.process_time()
        for message in self._messages:
            self._socket.send(self._encoder.encode(message), copy=False)
        ran = Ran(start_s=start_s, end_s=time.monotonic(), cpu_s=time.process_time() - cpu_s, messages=len(self._messages))
        self._messages = []
        return ran

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


class Puller:
    """A trainer's end."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(_WAIT_S * 1e3))
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(list[Plain])
        self._order: Order | None = None

    def prepare(self, order: Order) -> None:
        self._order = order

    def run(self) -> Ran:
        assert self._order is not None
        counts = Counts(self._order)
        start_s, cpu_s = time.monotonic(), time.process_time()
        while not counts.complete:
            try:
                body = self._socket.recv(copy=False).buffer
            except zmq.Again as error:
                raise BusError(f"bench bus: expected a message on the socket within {_WAIT_S:.0f} s, got none") from error
            samples = self._decoder.decode(body)
            counts.add(samples=len(samples), tokens=sum(len(sample.tokens) for sample in samples), nbytes=len(body))
        end_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
        return counts.ran(start_s=start_s, end_s=end_s, cpu_s=cpu_s)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
