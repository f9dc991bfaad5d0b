"""A lane's process: `python -m benchmarks.bus.worker END TRANSPORT ADDRESS`, orders on standard input, answers on standard output.

Each order is a line of JSON; the lane prepares and answers `ready`; an empty line starts it, and its `Ran` is the answer to that. It ends
when its standard input does.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

import msgspec

from benchmarks.bus.lanes import Lane, Order
from benchmarks.bus.plan import Transport

End = Literal["producer", "consumer"]


def make_lane(end: End, transport: Transport, address: str) -> Lane:
    """The lane of one end; imports only what this one needs."""
    if transport is Transport.STREAMRL:
        from benchmarks.bus.ours import Consumer, Producer

        return Producer(address) if end == "producer" else Consumer(address)
    if transport in (Transport.REDIS_ORJSON, Transport.REDIS_PICKLE):
        from benchmarks.bus.redis_streams import Reader, Writer

        return Writer(address, transport) if end == "producer" else Reader(address, transport)
    if transport is Transport.ZMQ_MSGPACK:
        from benchmarks.bus.zmq_sockets import Puller, Pusher

        return Pusher(address) if end == "producer" else Puller(address)
    from benchmarks.bus.ray_store import Driver

    return Driver()


def main() -> None:
    """Serve orders until standard input ends."""
    end, transport, address = sys.argv[1:]
    # What the libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lane = make_lane("producer" if end == "producer" else "consumer", Transport(transport), address)
    try:
        for line in sys.stdin.buffer:
            if line.strip():
                lane.prepare(msgspec.json.decode(line, type=Order))
                answer: object = "ready"
            else:
                answer = lane.run()
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()
    finally:
        lane.close()


if __name__ == "__main__":
    main()
