"""A stretch of a stream: reading that does not wait for what is still to come."""

from __future__ import annotations

from collections.abc import AsyncIterator

from streamrl.bus.protocol import Log, Message


async def stretch(log: Log, stream: str, *, first: int, last: int, subject: str | None = None) -> AsyncIterator[Message]:
    """The messages `first` to `last`, both included; none where `last` is below `first`. With `subject` those of it, which ends at `last`.

    Raises:
        LogTruncated: see `Log.read`.
    """
    if last < first:
        return
    async for message in log.read(stream, after=first - 1, subject=subject):
        yield message
        if message.sequence >= last:
            return
