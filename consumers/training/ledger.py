"""The ledger of one trainer: what has been trained, and the fence that keeps a second trainer out."""

from __future__ import annotations

import logging

import msgspec

from streamrl.bus.protocol import Bus
from streamrl.bus.reading import stretch
from streamrl.consumers.training.spilled_drops import spill
from streamrl.consumers.training.trimming import trim_if_full
from streamrl.errors import Conflict, Fenced, StreamFull, TrainingError
from streamrl.runtime.run_end import fence_of
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.ledger import LedgerEntry, take_entry
from streamrl.schemas.samples import MARK_EPOCH, EpochMark, Mark
from streamrl.schemas.subjects import LEDGER, PREFIX_FENCES, Subjects

logger = logging.getLogger(__name__)


class Ledger:
    """Entries by version number (of the newest epoch), and the tail that the next append must follow.

    Make one with `open_ledger`. Not safe for several threads.
    """

    def __init__(self, bus: Bus, subjects: Subjects, trainer: str, fence: int) -> None:
        self.trainer = trainer
        self.fence = fence
        self.entries: dict[int, LedgerEntry] = {}
        self.gaps: dict[int, LedgerEntry] = {}
        """Entries of gaps, by the epoch that begins with them."""
        self.max_epoch = 0
        self.last_number = 0
        """Highest version number on the line of versions that has an entry; 0 if none has."""
        self._bus = bus
        self._subject = subjects.ledger(trainer)
        self.tail = 0
        """Sequence of the newest entry, which the next one must follow."""
        self.newest: LedgerEntry | None = None
        """The newest entry; None where there is none, or a gap."""
        self._numbers: dict[int, tuple[int, int]] = {}

    @property
    def forks(self) -> tuple[EpochMark, ...]:
        """Where each epoch after 0 began, and how far the one before it had come; epochs whose entries are all lost begin with the gap."""
        found: list[EpochMark] = []
        before = 0
        for epoch in sorted({*self._numbers, *self.gaps} - {0}):
            if (gap := self.gaps.get(epoch)) is not None and gap.gap is not msgspec.UNSET:
                first, last = gap.gap.first_after(gap.version), gap.gap.highest.number
                found += [EpochMark(each, first, last) for each in range(before + 1, epoch + 1)]
            elif before in self._numbers:
                found.append(EpochMark(epoch, self._numbers[epoch][0], self._numbers[before][1]))
            before = epoch
        return tuple(found)

    def at(self, number: int) -> LedgerEntry | None:
        """The entry that made version `number`, if it is there."""
        return self.entries.get(number)

    def leads_on(self, number: int) -> bool:
        """Whether every version after `number` has its entry, so that a trainer can come from there to the end; ask before `forget`."""
        return all(later in self.entries for later in range(number + 1, self.last_number + 1))

    def forget(self, number: int) -> None:
        """Free the entries up to version `number`; `at` no longer finds them."""
        for old in [n for n in self.entries if n <= number]:
            del self.entries[old]

    async def load(self) -> None:
        """Read every entry there is; what is missing is for `streamrl.consumers.training.gaps` to find."""
        newest = await self._bus.last(self._subject)
        first = (await self._bus.state(LEDGER)).first
        async for message in stretch(self._bus, LEDGER, first=first, last=newest.sequence if newest else 0, subject=self._subject):
            self._take(decode(message.body, LedgerEntry, where=f"{self._subject} sequence {message.sequence}"), message.sequence)

    async def append(self, entry: LedgerEntry) -> None:
        """Make an entry durable; drops that would not fit a message go into a blob first.

        Raises:
            StreamFull: there is no room for that blob.
            Fenced: a newer trainer has appended; this one must exit.
            TrainingError: an older trainer slipped an entry in before it was fenced; start again from the checkpoint to train by it.
        """
        version = entry.version
        entry = await spill(self._bus.blobs, entry)
        try:
            receipt = await self._bus.publish(
                self._subject,
                encode(entry),
                id=f"l{self.trainer}.{version.epoch}.{version.number}.{self.fence}",
                expect_subject_last=self.tail,
            )
        except Conflict as error:
            raise await self._refused(entry) from error
        self._take(entry, receipt.sequence)
        if entry.gap is msgspec.UNSET:
            self.forget(entry.version.number)

    async def _refused(self, entry: LedgerEntry) -> Exception:
        newest = await self._bus.last(self._subject)
        other = decode(newest.body, LedgerEntry, where=self._subject) if newest else entry
        if other.fence > self.fence:
            return Fenced(
                f"trainer {self.trainer!r} with fence {self.fence} was refused at version {entry.version}: "
                f"a trainer with fence {other.fence} has written version {other.version}",
                hint="another process trains this run; nothing is to be done here",
                fence=self.fence,
            )
        return TrainingError(
            f"the ledger of {self.trainer!r} grew to version {other.version} while version {entry.version} was being trained",
            hint="a former trainer finished its last write late; a restart from the checkpoint trains by that entry",
        )

    def _take(self, entry: LedgerEntry, sequence: int) -> None:
        take_entry(self.entries, self.gaps, entry)
        number, epoch = entry.version.number, entry.version.epoch
        self.max_epoch = max(self.max_epoch, epoch)
        self.tail = sequence
        if entry.gap is not msgspec.UNSET:
            self.last_number, self.newest = number, None
            return
        self.newest = entry
        self.last_number = max(self.last_number, number)
        first, last = self._numbers.get(epoch, (number, number))
        self._numbers[epoch] = (min(first, number), max(last, number))


async def open_ledger(bus: Bus, subjects: Subjects, trainer: str, *, fence: int = 0) -> Ledger:
    """Read a trainer's ledger. A reader that will not append leaves `fence` at 0."""
    ledger = Ledger(bus, subjects, trainer, fence)
    await ledger.load()
    return ledger


async def take_fence(bus: Bus, trainer: str) -> int:
    """A fencing token higher than any before it; whoever held a lower one is refused at the ledger from its successor's entry on.

    Raises:
        SchemaError: the key has something else than a token.
    """
    key = PREFIX_FENCES + trainer
    while True:
        entry = await bus.kv.get(key)
        token = fence_of(entry, key) + 1
        try:
            await bus.kv.put(key, str(token).encode(), expect=entry.revision if entry else 0)
        except Conflict:
            continue
        logger.info("event=fence_taken trainer=%s fence=%d", trainer, token)
        return token


async def mark_epoch(bus: Bus, subjects: Subjects, trainer: str, fork: EpochMark) -> None:
    """Tell the sample stream of a forked epoch; the fold lets its versions pass from there on. A repeat changes nothing.

    Raises:
        StreamFull: there is no room, also after a trim.
    """
    await publish_mark(bus, subjects, Mark(name=MARK_EPOCH, detail=msgspec.to_builtins(fork)), id=f"m{trainer}.{fork.epoch}")
    logger.info("event=epoch_marked epoch=%d first=%d last_before=%d", fork.epoch, fork.first, fork.last_before)


async def publish_mark(bus: Bus, subjects: Subjects, mark: Mark, *, id: str | None = None) -> None:
    """Put a mark onto the sample stream; raises StreamFull when there is no room, also after a trim."""
    try:
        await bus.publish(subjects.marks, encode(mark), id=id)
    except StreamFull:
        await trim_if_full(bus)
        await bus.publish(subjects.marks, encode(mark), id=id)
