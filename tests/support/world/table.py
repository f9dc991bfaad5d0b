"""The table of deaths of services: who is ended, at which of its calls, beside whom. The runs of `tests/kill` go through it."""

from tests.support.world.fuse import Spot, around
from tests.support.world.world import Row

LINES = (
    *("put fences", "read ledger", "get latest", "load", "state", "get positions", "put granted", "shards", "offer", "put blob"),
    *("publish weights", "fetch", "read samples", "publish dead", "step", "publish ledger", "save", "put latest", "put positions"),
    "delete blob",
)
"""Every call of the trainer's loop at which it may end, in the order of a resumed process; only that has something to load and to fetch."""
OTHERS = ("engine", "producer", "feeder")
TRAINER = Row("trainer", [Spot("put latest", "after", 2), *around(*LINES), Spot("saved", "after")], OTHERS)
TRAINER_AGAIN = Row(
    "trainer",
    [
        *(Spot(name, when, 3) for name in ("step", "publish ledger") for when in ("before", "after")),
        Spot("put granted", "before", 5),
        Spot("offer", "after", 3),
        *around("put latest", "put positions", counts=(2,)),
    ],
    OTHERS,
)
"""Later calls of a life of its own."""
REAPER = Row(
    "trainer",
    [*around("state tasks", "fetch tasks"), *around("get fences", counts=(2,)), *around("publish tombstones")],
    ("engine", "producer"),
)
"""Calls of the reaper beside the trainer, where a task is lost; `get fences` is asked once before."""
PRODUCER = Row(
    "producer",
    [Spot("claim", "after", 2), *around("publish samples", "publish tombstones", "done", counts=(2,)), Spot("publish samples", "after", 7)],
    ("engine", "trainer", "feeder"),
)
FEEDER = Row("feeder", around("publish tasks", counts=(1, 4)), ("engine", "trainer", "producer"))
REWARDER = Row(
    "rewarder",
    [Spot("claim", "after"), *around("publish rewards", "publish tombstones", "done", counts=(2,))],
    ("engine", "trainer", "producer", "feeder"),
)
"""Nobody else scores, so that the next one has to go on with what it left."""
ASKING = Row("producer", around("publish grading", "publish samples", counts=(2,)), ("engine", "trainer", "feeder", "rewarder"))
"""A producer that asks a rewarder."""
GATEWAY = Row(
    "gateway",
    [
        Spot("claim", "after"),
        *around("put turn", counts=(1, 5)),
        *around("read turns", "publish samples", "publish tombstones", "publish rewards", "remove turns", "done"),
    ],
    (),
)
"""The turns of its journal are of all kinds: who has a session, what he was told, what it is worth, that it has ended."""
EVALUATOR = Row(
    "evaluator",
    [
        Spot("store", "before"),
        *(Spot("store", "after", count) for count in (1, 4)),
        *around("publish events"),
        Spot("store", "before", 3),
        Spot("publish events", "before"),
    ],
    ("engine", "producer"),
)
TRIMMING = Row("trainer", around("save", "put latest", "put positions", "trim"), OTHERS)
"""For a trainer whose stream is full."""
