"""Trimming of the sample stream below what its readers still need."""

from __future__ import annotations

import asyncio
import logging

from streamrl.bus.protocol import Bus, Log
from streamrl.bus.reading import read_key
from streamrl.errors import BusError
from streamrl.schemas.control import Position
from streamrl.schemas.subjects import PREFIX_POSITIONS, SAMPLES

logger = logging.getLogger(__name__)

TRIM_ABOVE = 0.7
"""The sample stream is trimmed once it fills more than this share of its byte budget; the rest holds more than the largest message."""
TRIM_EVERY_S = 1.0
"""Between two looks at whether it is."""


async def keep_trimmed(bus: Bus) -> None:
    """Trim again and again, for ever, while the run's trainer lives.

    A trainer trims with its checkpoints, but once a tap's position has let the stream fill up there are no more steps and no checkpoints:
    then it is this that notices that the tap has moved on, or has lapsed.
    """
    while True:
        await asyncio.sleep(TRIM_EVERY_S)
        try:
            await trim_if_full(bus, warn=False)
        except BusError as error:
            logger.warning("event=samples_not_trimmed error=%s", error.message)


async def nearly_full(bus: Log) -> bool:
    """Whether the sample stream is to be trimmed."""
    state = await bus.state(SAMPLES)
    return state.max_bytes > 0 and state.bytes > TRIM_ABOVE * state.max_bytes


async def holds_the_stream(bus: Bus, reader: str) -> bool:
    """Whether no other reader needs older messages than `reader` does."""
    needed = await read_positions(bus)
    return reader in needed and needed[reader] <= min(needed.values())


async def read_positions(bus: Bus) -> dict[str, int]:
    """The oldest message that each reader needs."""
    found = [await read_key(bus.kv, key, Position) for key in await bus.kv.keys(PREFIX_POSITIONS)]
    return {position.reader: position.oldest_needed for position in found if position is not None}


async def trim_if_full(bus: Bus, *, warn: bool = True) -> bool:
    """Trim the sample stream below what its readers still need, once it is nearly full.

    Args:
        bus: connected.
        warn: say when nothing can be trimmed.

    Returns:
        Whether it is nearly full all the same.
    """
    state = await bus.state(SAMPLES)
    if state.max_bytes <= 0 or state.bytes <= TRIM_ABOVE * state.max_bytes:
        return False
    through = min((await read_positions(bus)).values(), default=1) - 1
    if through >= state.first:
        await bus.trim(SAMPLES, through=through)
        logger.info("event=samples_trimmed through=%d bytes=%d", through, state.bytes)
        return await nearly_full(bus)
    if warn:
        logger.warning("event=samples_nearly_full first=%d bytes=%d max_bytes=%d", state.first, state.bytes, state.max_bytes)
    return True
