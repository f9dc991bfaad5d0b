"""What is done to whom, and when: the matrix of parts and faults, and the moments that a strike can be aimed at."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from tests.support.world.damage import CHECKPOINTS, STREAMS
from tests.support.world.shapes import NAME, Shape
from tests.support.world.wire import Where

PARTS = ("trainer", "engine", "producer", "attached producer", "feeder", "nats-server")
RANK_1 = "trainer's rank 1"
"""Of a run whose trainer has two ranks; `trainer` is rank 0."""
GATEWAY, AGENT = "gateway", "agent"
"""Of a run whose tasks go to agents too. A `cut` of the agent's is from the gateway."""
WHOLE = "whole run"
"""Supervisor, workers, the children that run user code and the nats-server at once; then `streamrl up` again."""
GRADER = "grader"
"""A process in which the supervised producer's rewards run."""
Kind = Literal["kill -9", "SIGSTOP", "cut", "HTTP cut", "damage"]
KINDS: tuple[Kind, ...] = ("kill -9", "SIGSTOP", "cut", "HTTP cut", "damage")
"""`cut` is from the nats-server, `HTTP cut` from the engine; `damage` is done to the disk between the death of the whole run and its next
start."""
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
TURNS: dict[str, tuple[str, bytes]] = {
    "turn": (GATEWAY, f"PUB $KV.{NAME}+turns.".encode()),
    "gateway's samples": (GATEWAY, f"PUB {NAME}.samples.".encode()),
}
"""Aims on the gateway's wire: a session's journal, and what comes of it in the end."""
WHERE: tuple[Where, ...] = ("before", "within", "after")


class Fault(msgspec.Struct, frozen=True):
    """One strike. Without an aim it falls at a random moment under load."""

    part: str
    kind: Kind
    aim: str = ""
    where: Where = "within"
    damage: str = ""
    """One of `tests.support.world.damage.DAMAGES`."""

    @property
    def moment(self) -> str:
        """As the logs say it."""
        if not self.aim:
            return f"random, {self.damage}" if self.damage else "random"
        return "within checkpoint" if self.aim == CHECKPOINT else f"{self.where} {self.aim}"


def matrix(rng: random.Random) -> list[Fault]:
    """Every part with every fault that it can have once, at random moments, in random order."""
    faults = [Fault(part, kind) for part in PARTS for kind in KINDS[:4] if kind != "HTTP cut" or part in ON_HTTP]
    faults += [Fault(GRADER, kind) for kind in KINDS[:2]]
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


def falls(rng: random.Random, shape: Shape) -> list[Fault]:
    """The whole run at random moments and inside writes, and each damage that it must stand."""
    found = [Fault(WHOLE, "kill -9"), Fault(WHOLE, "kill -9", CHECKPOINT)]
    found += [Fault(WHOLE, "kill -9", aim, rng.choice(WHERE)) for aim in ("commit", "latest", "samples", "task")]
    damages = STREAMS if shape.losses else CHECKPOINTS
    found += [Fault(WHOLE, "damage", damage=damage) for damage in damages]
    rng.shuffle(found)
    return found


def ranks(rng: random.Random) -> list[Fault]:
    """Each rank of a trainer of two and the whole run, at random moments and inside writes, and each damage to a checkpoint in parts."""
    found = [Fault(part, kind) for part in ("trainer", RANK_1) for kind in KINDS[:3]]
    found += [Fault(part, "kill -9") for part in (WHOLE, "nats-server")]
    found += [Fault(part, "kill -9", CHECKPOINT) for part in ("trainer", RANK_1, WHOLE)]
    found += [Fault(part, "kill -9", "commit", rng.choice(WHERE)) for part in ("trainer", RANK_1, WHOLE)]
    found += [Fault(WHOLE, "damage", damage=damage) for damage in CHECKPOINTS]
    rng.shuffle(found)
    return found


def of_agents(rng: random.Random) -> list[Fault]:
    """Gateway and agents at random moments, and the gateway and who it stores with inside writes."""
    found = [Fault(part, kind) for part, kinds in ((GATEWAY, KINDS[:4]), (AGENT, KINDS[:3])) for kind in kinds]
    where = itertools.cycle(rng.sample(WHERE, 3))
    found += [Fault(GATEWAY, kind, aim, next(where)) for aim, kind in itertools.product(TURNS, KINDS[:3])]
    found += [Fault("nats-server", "kill -9", "turn", "within"), Fault("engine", "kill -9"), Fault(WHOLE, "kill -9")]
    rng.shuffle(found)
    return found


def endless(rng: random.Random, shape: Shape) -> Iterator[Fault]:
    """The whole matrix and all aims, again and again in new orders; of a shape that may lose something the falls alone.

    In one with user code that misbehaves, every part is killed and a checkpoint damaged, and nothing is aimed: too much happens at once.
    """
    while True:
        if shape.losses:
            yield from falls(rng, shape)
        elif shape.ranks > 1:
            yield from ranks(rng)
        elif shape.agents:
            yield from of_agents(rng)
        elif shape.misdeed_every:
            kills = [Fault(part, "kill -9") for part in (*PARTS, WHOLE)]
            kills.append(Fault(WHOLE, "damage", damage=rng.choice(list(CHECKPOINTS))))
            rng.shuffle(kills)
            yield from kills
        else:
            faults = matrix(rng) + aimed(rng, bus_weights=shape.name != "quickstart") + falls(rng, shape)
            rng.shuffle(faults)
            yield from faults
