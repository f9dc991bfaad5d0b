"""Redis streams: one XADD a message, one message a XREAD, no acknowledgements, nothing on disk.

This is how PipelineRL moves rollouts (pipelinerl/streams.py); it pickles them on one path and writes them with orjson on the other.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import pickle  # what is measured reads what the benchmark itself wrote
import time
from collections.abc import Callable
from typing import Any

from benchmarks.bus.lanes import Counts, Order, Ran
from benchmarks.bus.payload import NUM_PATTERNS, group, mapping
from benchmarks.bus.plan import Transport
from streamrl.errors import BusError

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


class Writer:
    """A producer's end."""

    def __init__(self, address: str, transport: Transport) -> None:
        self._redis = _connected(address)
        self._encode = codec(transport)[0]
        self._messages: list[Message] = []

    def prepare(self, order: Order) -> None:
        self._redis.delete(STREAM)
        patterns = [[mapping(sample) for sample in group(order.cell, pattern)] for pattern in range(NUM_PATTERNS)]
        self._messages = [
            [{**sample, "task": order.first_task + number} for sample in patterns[number % NUM_PATTERNS]]
            for number in range(order.num_tasks)
        ]

    def run(self) -> Ran:
        start_s, cpu_s = time.monotonic(), time.process_time()
        for index, message in enumerate(self._messages):
            fields = {"index": index, "data": self._encode(message)}
            self._redis.xadd(STREAM, fields, maxlen=MAX_LENGTH, approximate=True)
        ran = Ran(start_s=start_s, end_s=time.monotonic(), cpu_s=time.process_time() - cpu_s, messages=len(self._messages))
        self._messages = []
        return ran

    def close(self) -> None:
        self._redis.close()


class Reader:
    """A trainer's end."""

    def __init__(self, address: str, transport: Transport) -> None:
        self._redis = _connected(address)
        self._decode = codec(transport)[1]
        self._order: Order | None = None

    def prepare(self, order: Order) -> None:
        self._order = order

    def run(self) -> Ran:
        assert self._order is not None
        counts = Counts(self._order)
        last: bytes | int = 0
        start_s, cpu_s = time.monotonic(), time.process_time()
        heard_s = start_s
        while not counts.complete:
            answer = self._redis.xread({STREAM: last}, count=1, block=_BLOCK_MS)
            if not answer:
                if time.monotonic() - heard_s > _WAIT_S:
                    raise BusError(f"bench bus: expected a message from Redis within {_WAIT_S:.0f} s, got none")
                continue
            heard_s = time.monotonic()
            ((last, fields),) = answer[0][1]
            body = fields[b"data"]
            samples = self._decode(body)
            counts.add(samples=len(samples), tokens=sum(len(sample["tokens"]) for sample in samples), nbytes=len(body))
        end_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
        return counts.ran(start_s=start_s, end_s=end_s, cpu_s=cpu_s)

    def close(self) -> None:
        self._redis.close()
