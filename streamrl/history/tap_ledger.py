"""The parent's ledger as it grows: what a tap trains by."""

from __future__ import annotations

import asyncio

from streamrl.bus.protocol import Log
from streamrl.schemas.codec import decode
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import LEDGER, Subjects

AHEAD = 512
"""Entries that are read ahead of the tap; it frees them as it trains."""


class FollowedLedger:
    """Reads a trainer's entries on the bus's loop; the training thread asks `at`. Satisfies `streamrl.consumers.training.steps.Entries`.

    A version that the parent trained again after a crash has the same batch, so that either entry serves.
    """

    def __init__(self, log: Log, loop: asyncio.AbstractEventLoop, subjects: Subjects, trainer: str, *, after: int) -> None:
        self._log = log
        self._subject = subjects.ledger(trainer)
        self._done = after
        self._entries: dict[int, LedgerEntry] = {}
        self._failure: BaseException | None = None
        self._task = asyncio.run_coroutine_threadsafe(self._follow(), loop)

    def at(self, number: int) -> LedgerEntry | None:
        """The entry that made version `number`, once it is there; those below are freed. Raises what reading raised."""
        if self._failure is not None and number not in self._entries:
            raise self._failure
        self._done = max(self._done, number - 1)
        for old in [n for n in list(self._entries) if n < number]:
            del self._entries[old]
        return self._entries.get(number)

    def close(self) -> None:
        """Stop reading."""
        self._task.cancel()

    async def _room(self, number: int) -> None:
        # The other thread makes the room, and no asyncio.Event may be set from there.
        while number > self._done + AHEAD:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _follow(self) -> None:
        try:
            async for message in self._log.read(LEDGER, after=0, subject=self._subject):
                entry = decode(message.body, LedgerEntry, where=f"{self._subject} sequence {message.sequence}")
                await self._room(entry.version.number)
                if entry.version.number > self._done:
                    self._entries[entry.version.number] = entry
        except asyncio.CancelledError:
            raise
        except Exception as error:  # handed to the training thread, which raises it
            self._failure = error
