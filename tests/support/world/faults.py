"""What is done to whom, and when: the matrix of parts and faults, and the moments that a strike can be aimed at."""

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
    held_s: float = 0.0
    """Seconds that a stop lasts; 0: as long as the run's others."""

    @property
    def moment(self) -> str:
        if not self.aim:
            return f"random, {self.damage}" if self.damage else "random"
        return "within checkpoint" if self.aim == CHECKPOINT else f"{self.where} {self.aim}"


EACH_KIND = [
    Fault("trainer", "kill -9", "commit", "after"),
    Fault("producer", "SIGSTOP", "samples", "within"),
    Fault("trainer", "cut", "manifest", "after"),
    Fault("producer", "HTTP cut", "request", "within"),
    Fault(WHOLE, "damage", damage="newest checkpoint cut"),
]
MATRIX = [Fault(part, kind) for part in PARTS for kind in KINDS[:4] if kind != "HTTP cut" or part in ON_HTTP]
"""Every part with every fault that it can have, at random moments."""
_AIMS: dict[tuple[str, Kind], tuple[str, Where]] = {
    ("trainer", "kill -9"): ("commit", "before"),
    ("trainer", "cut"): ("commit", "within"),
    ("nats-server", "kill -9"): ("commit", "within"),
    ("producer", "kill -9"): ("samples", "after"),
    ("attached producer", "SIGSTOP"): ("attached samples", "within"),
    ("attached producer", "HTTP cut"): ("attached request", "after"),
    ("feeder", "cut"): ("task", "after"),
    ("engine", "kill -9"): ("presence", "before"),
    ("engine", "HTTP cut"): ("request", "before"),
}
EVERY_PAIR = [
    *(Fault(each.part, each.kind, *_AIMS.get((each.part, each.kind), ("", "within"))) for each in MATRIX),
    Fault("trainer", "kill -9", CHECKPOINT),
    Fault("trainer", "kill -9", "weights bytes", "within"),
    Fault("trainer", "cut", "manifest", "after"),
    Fault(WHOLE, "kill -9", "latest", "before"),
    *(Fault(WHOLE, "damage", damage=damage) for damage in CHECKPOINTS),
]
"""The matrix, inside a write where one is the part's own, and the falls of the whole run."""
GRADERS = [Fault(GRADER, "kill -9"), Fault(GRADER, "SIGSTOP", held_s=8.0)]
"""One that is stopped for longer than a process may leave its event loop unanswered is given up, and killed."""
TORN = [Fault(WHOLE, "damage", damage=damage) for damage in STREAMS]
OF_AGENTS = [
    Fault(GATEWAY, "kill -9", "turn", "before"),
    Fault(AGENT, "SIGSTOP"),
    Fault(GATEWAY, "SIGSTOP", "turn", "within"),
    Fault(AGENT, "cut"),
    Fault(GATEWAY, "cut", "gateway's samples", "after"),
    Fault(AGENT, "kill -9"),
]
"""A gateway that is stopped outlives its claims, which are its own for one second: its sessions go on at its successor."""
OF_RANKS = [
    *(Fault(part, "kill -9", aim) for part in ("trainer", RANK_1, WHOLE) for aim in ("", CHECKPOINT)),
    Fault(RANK_1, "SIGSTOP"),
    Fault(RANK_1, "kill -9", "commit", "within"),
    *(Fault(WHOLE, "damage", damage=damage) for damage in CHECKPOINTS),
]


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
    return found


def falls(rng: random.Random, shape: Shape) -> list[Fault]:
    """The whole run at random moments and inside writes, and each damage that it must stand."""
    found = [Fault(WHOLE, "kill -9"), Fault(WHOLE, "kill -9", CHECKPOINT)]
    found += [Fault(WHOLE, "kill -9", aim, rng.choice(WHERE)) for aim in ("commit", "latest", "samples", "task")]
    damages = STREAMS if shape.losses else CHECKPOINTS
    found += [Fault(WHOLE, "damage", damage=damage) for damage in damages]
    return found


def ranks(rng: random.Random) -> list[Fault]:
    """Each rank of a trainer of two and the whole run, at random moments and inside writes, and each damage to a checkpoint in parts."""
    found = (
        OF_RANKS + [Fault(part, kind) for part in ("trainer", RANK_1) for kind in ("SIGSTOP", "cut")] + [Fault("nats-server", "kill -9")]
    )
    return found + [Fault(part, "kill -9", "commit", rng.choice(WHERE)) for part in ("trainer", WHOLE)]


def of_agents(rng: random.Random) -> list[Fault]:
    """Gateway and agents at random moments, and the gateway and who it stores with inside writes."""
    found = [Fault(part, kind) for part, kinds in ((GATEWAY, KINDS[:4]), (AGENT, KINDS[:3])) for kind in kinds]
    where = itertools.cycle(rng.sample(WHERE, 3))
    found += [Fault(GATEWAY, kind, aim, next(where)) for aim, kind in itertools.product(TURNS, KINDS[:3])]
    found += [Fault("nats-server", "kill -9", "turn", "within"), Fault("engine", "kill -9"), Fault(WHOLE, "kill -9")]
    return found


def endless(rng: random.Random, shape: Shape) -> Iterator[Fault]:
    """The whole matrix and all aims, again and again in new orders; of a shape that may lose something the falls alone."""
    while True:
        if shape.losses:
            faults = falls(rng, shape)
        elif shape.ranks > 1:
            faults = ranks(rng)
        elif shape.agents:
            faults = of_agents(rng)
        elif shape.misdeed_every:
            faults = [Fault(part, "kill -9") for part in (*PARTS, WHOLE)]
            faults.append(Fault(WHOLE, "damage", damage=rng.choice(list(CHECKPOINTS))))
        else:
            faults = MATRIX + GRADERS + aimed(rng, bus_weights=shape.name != "quickstart") + falls(rng, shape)
        rng.shuffle(faults)
        yield from faults
