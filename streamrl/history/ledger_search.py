"""Entries of a ledger by bisection: the whole of a long one is never read for a few."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from streamrl.bus.protocol import Log, Message
from streamrl.schemas.codec import decode
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import LEDGER


class EpochSpan(msgspec.Struct, frozen=True):
    """Where the entries of one epoch are. Within it versions rise, and the tasks granted with them; the next one may begin lower."""

    first: int
    """Sequence of its first entry."""
    last: int
    """No later entry is of this epoch; the entry at this sequence may be of another ledger."""
    entry: LedgerEntry
    """The first; where an epoch begins with a gap, that one."""


def read_entry(message: Message) -> LedgerEntry:
    """A stored entry of a ledger; raises SchemaError."""
    return decode(message.body, LedgerEntry, where=f"{message.subject} sequence {message.sequence}")


async def first_entry(
    log: Log, ledger: str, last: int, past: Callable[[LedgerEntry], bool], *, first: int = 0
) -> tuple[int, LedgerEntry | None]:
    """The sequence from which on entries are `past` (beyond `last`: none is), and the entry before; by bisection.

    Args:
        log: the log.
        ledger: subject of the ledger; entries of others, such as a tap's, lie between.
        last: sequence of the last one that is looked at.
        past: false for the first entries, true from one on.
        first: sequence of the first one that is looked at.
    """
    found = await log.first_from(LEDGER, first, subject=ledger)
    low, high, below = last + 1 if found is None else found.sequence, last + 1, None
    while low < high:
        middle = (low + high) // 2
        message = await log.first_from(LEDGER, middle, subject=ledger)
        if message is None or message.sequence >= high or past(entry := read_entry(message)):
            high = middle
        else:
            low, below = message.sequence + 1, entry
    return low, below


async def epochs(log: Log, ledger: str, last: int) -> list[EpochSpan]:
    """The epochs of a ledger up to a sequence, in order."""
    found: list[EpochSpan] = []
    begin = 0
    while (message := await log.first_from(LEDGER, begin, subject=ledger)) is not None and message.sequence <= last:
        entry = read_entry(message)
        epoch = entry.version.epoch
        begin, _ = await first_entry(log, ledger, last, lambda one, epoch=epoch: one.version.epoch > epoch, first=message.sequence)
        found.append(EpochSpan(message.sequence, begin - 1, entry))
    return found
