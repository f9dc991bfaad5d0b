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
KINDS = ("kill -9", "SIGSTOP", "cut")
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
WHERE: tuple[Where, ...] = ("before", "within", "after")


class Fault(msgspec.Struct, frozen=True):
    """One strike. Without an aim it falls at a random moment under load."""

    part: str
    kind: Literal["kill -9", "SIGSTOP", "cut"]
    aim: str = ""
    where: Where = "within"

    @property
    def moment(self) -> str:
        """As the logs say it."""
        if not self.aim:
            return "random"
        return "within checkpoint" if self.aim == CHECKPOINT else f"{self.where} {self.aim}"


def matrix(rng: random.Random) -> list[Fault]:
    """Every part with every fault once, at random moments, in random order."""
    faults = [Fault(part, kind) for part in PARTS for kind in KINDS]  # type: ignore[arg-type]
    rng.shuffle(faults)
    return faults


def aimed(rng: random.Random, *, bus_weights: bool = True) -> list[Fault]:
    """Every aim once with every fault, against the sender or the server; every third of `before`, `within`, `after` in turn."""
    found: list[Fault] = []
    where = itertools.cycle(rng.sample(WHERE, 3))
    for aim, kind in itertools.product((*MESSAGES, CHECKPOINT), KINDS):
        if aim == "weights bytes" and not bus_weights:
            continue
        sender = "trainer" if aim == CHECKPOINT else MESSAGES[aim][0]
        part = "nats-server" if aim != CHECKPOINT and rng.random() < 0.25 else sender
        found.append(Fault(part, kind, aim, next(where)))  # type: ignore[arg-type]
    rng.shuffle(found)
    return found


def endless(rng: random.Random, *, bus_weights: bool = True) -> Iterator[Fault]:
    """The whole matrix and all aims, again and again in new orders."""
    while True:
        faults = matrix(rng) + aimed(rng, bus_weights=bus_weights)
        rng.shuffle(faults)
        yield from faults
