"""What is measured of a run that is up: how fast it trains, and how soon those who come back take part again."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pyarrow as pa

from streamrl.bus.protocol import Bus
from streamrl.schemas.subjects import SAMPLES, Subjects
from tests.support.processes import descendants, processor_s
from tests.support.world.shapes import NAME
from tests.support.world.wire import Wire

if TYPE_CHECKING:
    from tests.support.world.disturbed import Disturbed

PATIENCE_S = 120.0
LOOK_EVERY_S = 0.25


async def first_record(bus: Bus, after: int, since_s: float) -> float:
    """Seconds from then to the first samples that a producer of no supervisor has stored behind `after`; -1: none came."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for message in bus.read(SAMPLES, after=after, subject=Subjects(NAME).samples("main")):
                with pa.ipc.open_stream(message.body) as reader:
                    batch = reader.read_next_batch()
                    # What the one before had sent may still arrive.
                    if batch.column("producer")[0].as_py() != "producer-0" and min(batch.column("started_s").to_pylist()) >= since_s:
                        return message.time_s - since_s
    except TimeoutError:
        pass
    finally:
        await bus.close()
    return -1.0


async def first_answer(http: Wire, struck_s: float) -> float:
    """Seconds to the first bytes of the engine to a producer, over a connection that is younger than the strike; -1: none came."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        answers = [link.answered_s for link in http.links if link.opened_s > struck_s and link.answered_s]
        if answers:
            return min(answers) - struck_s
        await asyncio.sleep(0.02)
    return -1.0


async def speed(run: Disturbed, last: int) -> tuple[int, float, float]:
    """Let all the work through; samples, seconds and processor seconds of all processes between the first and the last entry seen."""
    run.open(10**6)
    looks: list[tuple[int, float, float]] = []
    while run.up.returncode is None and run.versions < last:
        await asyncio.sleep(LOOK_EVERY_S)
        if run.versions:
            looks.append((sum(run.entries.values()), time.monotonic(), processor_s([run.up.pid, *descendants(run.up.pid)])))
    begin, end = looks[0], looks[-1]
    return end[0] - begin[0], end[1] - begin[1], end[2] - begin[2]
