"""What is done to whom, and when: the matrix of parts and faults, and the moments that a strike can be aimed at."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from tests.faults.shapes import NAME
from tests.faults.wire import Where

PARTS = ("trainer", "engine", "producer", "attached producer", "feeder", "nats-server")
Kind = Literal["kill -9", "SIGSTOP", "cut", "HTTP cut"]
KINDS: tuple[Kind, ...] = ("kill -9", "SIGSTOP", "cut", "HTTP cut")
"""`cut` is from the nats-server, `HTTP cut` from the engine."""
ON_HTTP = ("producer", "attached producer", "engine")
"""Parts that have connections to be cut by `HTTP cut`; with the engine everybody's are cut at once."""
CHECKPOINT = "checkpoint"
MESSAGES: dict[str, tuple[str, bytes]] = {
    "commit": ("trainer", f"PUB {NAME}.ledger.".encode()),
    "weights bytes": ("trainer", f"PUB $O.{NAME}.C.".encode()),
    "manifest": ("trainer", f"PUB {NAME}.weights.".encode()),
    "grant": ("trainer", f"PUB $KV.{NAME}.granted".encode()),
    "latest": ("trainer", f"PUB $KV.{NAME}.latest.".encode()),
    "position": ("trainer", f"PUB $KV.{NAME}.positions.".encode()),
    "samples": ("producer", f"PUB {NAME}.samples.".encode()),
    "attached samples": ("attached producer", f"PUB {NAME}.samples.".encode()),
    "task": ("feeder", f"PUB {NAME}.tasks.".encode()),
    "presence": ("engine", f"PUB $KV.{NAME}.presence.engines.".encode()),
}
"""Aims on the wire: who sends the message, and how its line begins. One aim more, the writing of a checkpoint, is seen in its files."""
_FRAME = b"\x82\xfe"
"""How a client's WebSocket frame of more than 125 bytes begins: on a channel, one with requests."""
REQUESTS: dict[str, tuple[str, bytes]] = {"request": ("producer", _FRAME), "attached request": ("attached producer", _FRAME)}
"""Aims on the wire to the engine. `after`: the engine has the request, and nothing of its answer gets through."""
WHERE: tuple[Where, ...] = ("before", "within", "after")


class Fault(msgspec.Struct, frozen=True):
    """One strike. Without an aim it falls at a random moment under load."""

    part: str
    kind: Kind
    aim: str = ""
    where: Where = "within"

    @property
    def moment(self) -> str:
        """As the logs say it."""
        if not self.aim:
            return "random"
        return "within checkpoint" if self.aim == CHECKPOINT else f"{self.where} {self.aim}"


def matrix(rng: random.Random) -> list[Fault]:
    """Every part with every fault that it can have once, at random moments, in random order."""
    faults = [Fault(part, kind) for part in PARTS for kind in KINDS if kind != "HTTP cut" or part in ON_HTTP]
    rng.shuffle(faults)
    return faults


def aimed(rng: random.Random, *, bus_weights: bool = True) -> list[Fault]:
    """Every aim once with every fault, against the sender or who is sent to; every third of `before`, `within`, `after` in turn."""
    found: list[Fault] = []
    where = itertools.cycle(rng.sample(WHERE, 3))
    for aim, kind in itertools.product((*MESSAGES, CHECKPOINT), KINDS[:3]):
        if aim == "weights bytes" and not bus_weights:
            continue
        sender = "trainer" if aim == CHECKPOINT else MESSAGES[aim][0]
        part = "nats-server" if aim != CHECKPOINT and rng.random() < 0.25 else sender
        found.append(Fault(part, kind, aim, next(where)))
    for aim, kind in itertools.product(REQUESTS, ("kill -9", "SIGSTOP", "HTTP cut")):
        found.append(Fault("engine" if rng.random() < 0.25 else REQUESTS[aim][0], kind, aim, next(where)))
    rng.shuffle(found)
    return found


def endless(rng: random.Random, *, bus_weights: bool = True) -> Iterator[Fault]:
    """The whole matrix and all aims, again and again in new orders."""
    while True:
        faults = matrix(rng) + aimed(rng, bus_weights=bus_weights)
        rng.shuffle(faults)
        yield from faults
