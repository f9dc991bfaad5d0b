"""A reader's position that lapses: what keeps the sample stream from being trimmed under a tap or a recording."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from streamrl.bus.protocol import Bus
from streamrl.errors import BusError, Conflict
from streamrl.schemas.codec import encode
from streamrl.schemas.control import Position
from streamrl.schemas.subjects import PREFIX_POSITIONS, SAMPLES
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def keeping_position(bus: Bus, reader: str, *, lease_s: int, release: bool = False) -> AsyncGenerator[None]:
    """While open, renew the lease of `positions/<reader>` three times in its life; whoever trains moves it meanwhile.

    A process that dies stops renewing, and after `lease_s` its key is gone: the stream may be trimmed again.

    Args:
        bus: connected.
        reader: name of the position; put there by the caller, now or later.
        lease_s: whole seconds.
        release: delete the position at the end instead of letting it lapse.
    """
    keeper = asyncio.create_task(_keep(bus, PREFIX_POSITIONS + reader, lease_s))
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if release:
            with contextlib.suppress(BusError):
                await bus.kv.delete(PREFIX_POSITIONS + reader)


async def hold_stream(bus: Bus, reader: str, *, lease_s: int) -> None:
    """Put a position that holds the whole sample stream as it is now."""
    first = (await bus.state(SAMPLES)).first
    await bus.kv.put(PREFIX_POSITIONS + reader, encode(Position(reader, SAMPLES, first, Version())), ttl_s=lease_s)


async def _keep(bus: Bus, key: str, lease_s: int) -> None:
    known: bytes | None = None
    while True:
        try:
            entry = await bus.kv.get(key)
            if entry is not None and entry.value is not None:
                known = entry.value
            if known is not None:
                # Compare-and-set: a position that was moved in between has its whole lease anyway.
                with contextlib.suppress(Conflict):
                    await bus.kv.put(key, known, expect=entry.revision if entry else 0, ttl_s=lease_s)
        except BusError as error:
            logger.warning("event=position_not_renewed key=%s error=%s", key, error.message)
        await asyncio.sleep(lease_s / 3)
