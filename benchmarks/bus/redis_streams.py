"""Redis streams: one XADD a message, one message a XREAD, no acknowledgements, nothing on disk.

This is how PipelineRL moves rollouts (pipelinerl/streams.py); it pickles them on one path and writes them with orjson on the other.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import pickle  # what is measured reads what the benchmark itself wrote
import time
from collections.abc import Callable
from typing import Any

from benchmarks.bus.lanes import Order, Receiver, Sender
from benchmarks.bus.payload import mapping
from benchmarks.bus.plan import Transport
from streamrl.errors import BusError
from streamrl.schemas.samples import Sample

STREAM = "actor"
MAX_LENGTH = 1_000_000
_BLOCK_MS = 100
_WAIT_S = 120.0

Message = list[dict[str, Any]]


def codec(transport: Transport) -> tuple[Callable[[Message], bytes], Callable[[bytes], Message]]:
    """The functions that write and read a message."""
    if transport is Transport.REDIS_PICKLE:
        return pickle.dumps, pickle.loads
    import orjson

    return orjson.dumps, orjson.loads


def _connected(address: str) -> Any:
    import redis

    host, _, port = address.rpartition(":")
    return redis.Redis(host=host, port=int(port))


class Writer(Sender):
    """A producer's end."""

    def __init__(self, address: str, transport: Transport) -> None:
        super().__init__()
        self._redis = _connected(address)
        self._encode = codec(transport)[0]
        self._index = 0

    def prepare(self, order: Order) -> None:
        self._redis.delete(STREAM)
        super().prepare(order)

    def form(self, sample: Sample) -> dict[str, Any]:
        return mapping(sample)

    def renumber(self, formed: dict[str, Any], task: int) -> dict[str, Any]:
        return {**formed, "task": task}

    def send(self, message: Message) -> None:
        self._index += 1
        self._redis.xadd(STREAM, {"index": self._index, "data": self._encode(message)}, maxlen=MAX_LENGTH, approximate=True)

    def close(self) -> None:
        self._redis.close()


class Reader(Receiver):
    """A trainer's end."""

    def __init__(self, address: str, transport: Transport) -> None:
        self._redis = _connected(address)
        self._decode = codec(transport)[1]
        self._last: bytes | int = 0

    def prepare(self, order: Order) -> None:
        super().prepare(order)
        self._last = 0

    def receive(self) -> tuple[int, int, int]:
        until_s = time.monotonic() + _WAIT_S
        while not (answer := self._redis.xread({STREAM: self._last}, count=1, block=_BLOCK_MS)):
            if time.monotonic() > until_s:
                raise BusError(f"bench bus: expected a message from Redis within {_WAIT_S:.0f} s, got none")
        ((self._last, fields),) = answer[0][1]
        body = fields[b"data"]
        samples = self._decode(body)
        return len(samples), sum(len(sample["tokens"]) for sample in samples), len(body)

    def close(self) -> None:
        self._redis.close()
