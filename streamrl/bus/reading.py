"""What there is now, read without waiting for more: a stretch of a stream, the value of a key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from streamrl.bus.protocol import KeyValue, Log, Message
from streamrl.errors import NotFound
from streamrl.schemas.codec import decode

T = TypeVar("T")
_AT_ONCE = 8
"""Messages that are asked for together: each comes as a whole."""


async def stretch(log: Log, stream: str, *, first: int, last: int, subject: str | None = None) -> AsyncIterator[Message]:
    """The messages `first` to `last`, both included; none where `last` is below `first`. With `subject` those of it, which ends at `last`.

    Raises:
        LogTruncated: see `Log.read`.
    """
    if last < first:
        return
    if await log.first_from(stream, last, subject=subject) is None:  # a reader would wait for it
        begin = max(first, (await log.state(stream)).first)  # below it all was trimmed, which the reader says
        last = await _newest(log, stream, begin, last, subject)
        if last < first:
            return
    async for message in log.read(stream, after=first - 1, subject=subject):
        if message.sequence <= last:
            yield message
        if message.sequence >= last:
            return


async def _newest(log: Log, stream: str, first: int, last: int, subject: str | None) -> int:
    """Sequence of the newest message from `first` on where there is none from `last` on; `first` - 1 where there is none at all."""
    newest = first - 1
    while newest + 1 < last:
        middle = (newest + 1 + last) // 2
        found = await log.first_from(stream, middle, subject=subject)
        newest, last = (newest, middle) if found is None else (found.sequence, last)
    return newest


async def stored_between(log: Log, stream: str, start_s: float, end_s: float, *, subject: str | None = None) -> AsyncIterator[Message]:
    """Messages that were stored between two times (Unix seconds of the server), of `subject` if that is given; found by bisection.

    Raises:
        LogTruncated: the oldest of them went while they were read.
    """
    state = await log.state(stream)
    newest = state.last
    if subject is not None:
        found = await log.last(subject)
        newest = found.sequence if found is not None else 0
    low, high = state.first, newest
    while low < high:
        middle = (low + high) // 2
        found = await log.first_from(stream, middle, subject=subject)
        low, high = (found.sequence + 1, high) if found is not None and found.time_s < start_s else (low, middle)
    async for message in stretch(log, stream, first=low, last=newest, subject=subject):
        if message.time_s > end_s:
            return
        if message.time_s >= start_s:
            yield message


async def is_gone(log: Log, stream: str, sequence: int) -> bool:
    """Whether a message up to the end of a stream is no longer there."""
    try:
        await log.fetch(stream, sequence)
    except NotFound:
        return True
    return False


async def is_another(log: Log, stream: str, sequence: int, stored_s: float) -> bool:
    """Whether a stream that lost its end has grown again: the message `sequence` is there, and not the one that was stored at `stored_s`.

    False where that is not known (0.0).
    """
    try:
        return stored_s != 0.0 and (await log.fetch(stream, sequence)).time_s != stored_s
    except NotFound:
        return False


async def first_gone(log: Log, stream: str, sequences: Iterable[int]) -> int | None:
    """The lowest of these sequences whose message is gone although the stream begins before it and ends behind it.

    None where there is none: what was trimmed, or is beyond the end, is no hole. Nothing is asked for in a stream without holes.
    """
    state = await log.state(stream)
    if state.messages == state.last - state.first + 1:
        return None
    asked = sorted({sequence for sequence in sequences if state.first <= sequence <= state.last})
    for begin in range(0, len(asked), _AT_ONCE):
        some = asked[begin : begin + _AT_ONCE]
        gone = await asyncio.gather(*(is_gone(log, stream, sequence) for sequence in some))
        if any(gone):
            return some[gone.index(True)]
    return None


async def holes(log: Log, stream: str, *, first: int, last: int) -> list[tuple[int, int]]:
    """First and last of each row of sequences, `first` to `last`, whose messages are gone from the middle of a stream.

    What was trimmed, or is beyond the end, is no hole. A stream that has some is read from `first` to `last`.
    """
    state = await log.state(stream)
    if state.messages == state.last - state.first + 1:
        return []
    found: list[tuple[int, int]] = []
    following, last = max(first, state.first), min(last, state.last)
    async for message in stretch(log, stream, first=following, last=last):
        if message.sequence > following:
            found.append((following, message.sequence - 1))
        following = message.sequence + 1
    return [*found, (following, last)] if following <= last else found


async def read_key(keys: KeyValue, key: str, kind: type[T]) -> T | None:
    """The value of a key; None where there is none, or an empty one. Raises SchemaError for a value that is no `kind`."""
    entry = await keys.get(key)
    return decode(entry.value, kind, where=f"key {key}") if entry is not None and entry.value else None
