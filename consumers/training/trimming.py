"""Trimming of the sample stream below what its readers still need, and of the blobs that its samples name.

A blob goes before the message that names it, so that a crash between leaves a message whose blobs are removed again. It goes with the first
message of its task, a tombstone too: so what a producer stored and died before it could name goes as well. Where a checkpoint holds the
message itself, it stays until no checkpoint does (`release`). Images go when all tasks of their window have ended, and neither the stream
nor a checkpoint has a message of one of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from msgspec import UnsetType

from streamrl.bus.protocol import Bus
from streamrl.bus.reading import read_key, stretch
from streamrl.errors import BusError, LogTruncated
from streamrl.schemas.control import Grant, Position
from streamrl.schemas.images import window_named
from streamrl.schemas.subjects import HEADER_TASK, KEY_GRANTED, PREFIX_POSITIONS, SAMPLES

logger = logging.getLogger(__name__)

TRIM_ABOVE = 0.7
"""The sample stream is trimmed once it fills more than this share of its byte budget; the rest holds more than the largest message."""
TRIM_EVERY_S = 1.0
"""Between two looks at whether it is."""
ORPHAN_S = 300.0
"""Parts of a blob to which nothing was added for so long are of a producer that was killed; looked for as often."""


class _Place(NamedTuple):
    """Where the sample stream and its run stand."""

    first: int = 0
    last: int = 0
    first_open: int = 0


async def keep_trimmed(bus: Bus, *, images: bool) -> None:
    """Trim again and again, for ever, while the run's trainer lives.

    A trainer trims with its checkpoints, but once a tap's position has let the stream fill up there are no more steps and no checkpoints:
    then it is this that notices that the tap has moved on, or has lapsed. And when all stands still and waits for room, it looks for images
    whose tasks the grant did not say yet to have ended when the stream was trimmed last.

    Args:
        bus: connected.
        images: whether rows may have some.
    """
    swept_s = time.monotonic()
    before = looked = _Place()
    while True:
        await asyncio.sleep(TRIM_EVERY_S)
        try:
            if await trim_if_full(bus, warn=False) and images:
                state = await bus.state(SAMPLES)
                now = _Place(state.first, state.last, await _first_open(bus))
                if now == before != looked:
                    await _retire_images(bus, await bus.sample_blobs.names(), state.first - 1)
                    looked = now
                before = now
            if time.monotonic() - swept_s > ORPHAN_S:
                swept_s = time.monotonic()
                await bus.sample_blobs.sweep(ORPHAN_S)
        except BusError as error:
            logger.warning("event=samples_not_trimmed error=%s", error.message)


async def nearly_full(bus: Bus) -> bool:
    """Whether the sample stream is to be trimmed: it is nearly full itself, or what its samples name takes nearly all the room there is."""
    state = await bus.state(SAMPLES)
    return _above(state.bytes, state.max_bytes) or _above(*await bus.sample_blobs.room())


def _above(used: int, budget: int) -> bool:
    return budget > 0 and used > TRIM_ABOVE * budget


async def holds_the_stream(bus: Bus, reader: str) -> bool:
    """Whether no other reader needs older messages than `reader` does."""
    needed = await read_positions(bus)
    return reader in needed and needed[reader] <= min(needed.values())


async def read_positions(bus: Bus) -> dict[str, int]:
    """The oldest message that each reader needs."""
    return {position.reader: position.oldest_needed for position in await _positions(bus)}


async def _positions(bus: Bus) -> list[Position]:
    found = [await read_key(bus.kv, key, Position) for key in await bus.kv.keys(PREFIX_POSITIONS)]
    return [position for position in found if position is not None]


async def trim_if_full(bus: Bus, *, warn: bool = True) -> bool:
    """Trim the sample stream below what its readers still need, once it is nearly full.

    Args:
        bus: connected.
        warn: say when nothing can be trimmed.

    Returns:
        Whether it is nearly full all the same.
    """
    while await nearly_full(bus):
        state = await bus.state(SAMPLES)
        through = min((await read_positions(bus)).values(), default=1) - 1
        if through < state.first:
            if warn:
                logger.warning("event=samples_nearly_full first=%d bytes=%d max_bytes=%d", state.first, state.bytes, state.max_bytes)
            return True
        try:
            if names := await bus.sample_blobs.names():
                await _retire_blobs(bus, state.first, through)
                await _retire_images(bus, names, through)
        except LogTruncated:  # by a trimmer beside this one, while the messages were read
            continue
        await bus.trim(SAMPLES, through=through)
        logger.info("event=samples_trimmed through=%d bytes=%d", through, state.bytes)
        return await nearly_full(bus)
    return False


async def release(bus: Bus, carried: Mapping[int, int]) -> None:
    """Remove the blobs of tasks that checkpoints carried and do not any more, of which the messages are gone from the stream.

    Args:
        bus: connected.
        carried: task by sequence.
    """
    first = (await bus.state(SAMPLES)).first if carried else 0
    await _remove_blobs(bus, {str(task) for sequence, task in carried.items() if sequence < first})


async def _retire_blobs(bus: Bus, first: int, through: int) -> None:
    """Remove the blobs of tasks whose messages are about to go."""
    tasks: set[str] = set()
    async for message in stretch(bus, SAMPLES, first=first, last=through):
        tasks.add(message.headers.get(HEADER_TASK, ""))
    await _remove_blobs(bus, tasks)


async def _remove_blobs(bus: Bus, tasks: Set[str]) -> None:
    """Of these tasks, but for those whose messages a checkpoint holds."""
    if not tasks:
        return
    kept = {str(task) for task in await _carried(bus)}
    for name in await bus.sample_blobs.names():
        if name.partition("/")[0] in tasks - kept:
            await bus.sample_blobs.delete(name)


async def _retire_images(bus: Bus, names: Iterable[str], through: int) -> None:
    """Remove the images, of these blobs, of windows of which nothing is left but messages that are about to go."""
    windows = {name: window for name in names if (window := window_named(name))}
    if not windows:
        return
    first_open, carried = await _first_open(bus), await _carried(bus)
    windows = {name: (a, b) for name, (a, b) in windows.items() if b < first_open and not any(a <= task <= b for task in carried)}
    if not windows:
        return
    # Asked for behind the grant: what has ended by then has all its messages within.
    last = (await bus.state(SAMPLES)).last
    async for message in stretch(bus, SAMPLES, first=through + 1, last=last):
        text = message.headers.get(HEADER_TASK, "")
        if text.isdecimal() and len(text) <= 18:
            task = int(text)
            windows = {name: (a, b) for name, (a, b) in windows.items() if not a <= task <= b}
            if not windows:
                return
    for name in windows:
        await bus.sample_blobs.delete(name)


async def _first_open(bus: Bus) -> int:
    """All tasks below it have ended, as the grant says."""
    grant = await read_key(bus.kv, KEY_GRANTED, Grant)
    return 0 if grant is None or isinstance(grant.first_open, UnsetType) else grant.first_open


async def _carried(bus: Bus) -> set[int]:
    """Tasks whose messages a checkpoint holds."""
    return {task for one in await _positions(bus) if not isinstance(one.carried, UnsetType) for task in one.carried}
