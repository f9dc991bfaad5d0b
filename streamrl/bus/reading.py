"""What there is now, read without waiting for more: a stretch of a stream, the value of a key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from streamrl.bus.protocol import KeyValue, Log, Message
from streamrl.schemas.codec import decode

T = TypeVar("T")


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


async def read_key(keys: KeyValue, key: str, kind: type[T]) -> T | None:
    """The value of a key; None where there is none, or an empty one. Raises SchemaError for a value that is no `kind`."""
    entry = await keys.get(key)
    return decode(entry.value, kind, where=f"key {key}") if entry is not None and entry.value else None
