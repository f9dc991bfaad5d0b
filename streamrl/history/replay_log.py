"""What a replay reads from a log: the ledger, and what events and manifests tell of its run."""

from __future__ import annotations

from streamrl.bus.protocol import Log
from streamrl.schemas.codec import decode
from streamrl.schemas.events import NUMERICS_EVENT, Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import EVENTS, LEDGER, WEIGHTS, Subjects
from streamrl.schemas.weights import Manifest


class PastLedger:
    """A trainer's entries by version number, of the newest epoch. Satisfies `streamrl.consumers.training.steps.Entries`."""

    def __init__(self, entries: list[LedgerEntry]) -> None:
        self.entries: dict[int, LedgerEntry] = {}
        for entry in entries:
            known = self.entries.get(entry.version.number)
            if known is None or known.version.epoch <= entry.version.epoch:
                self.entries[entry.version.number] = entry

    def at(self, number: int) -> LedgerEntry | None:
        """The entry that made version `number`, if it is there."""
        return self.entries.get(number)

    def between(self, above: int, through: int | None) -> list[LedgerEntry]:
        """Entries with `above` < number <= `through` (None: to the end), by number, up to the first gap."""
        found: list[LedgerEntry] = []
        number = above + 1
        while (entry := self.entries.get(number)) is not None and (through is None or number <= through):
            found.append(entry)
            number += 1
        return found


async def read_past(log: Log, subjects: Subjects, trainer: str) -> PastLedger:
    """Everything that a trainer's ledger has at this moment, spilled drops left where they are."""
    subject = subjects.ledger(trainer)
    newest = await log.last(subject)
    entries: list[LedgerEntry] = []
    if newest is None:
        return PastLedger(entries)
    async for message in log.read(LEDGER, after=0, subject=subject):
        entries.append(decode(message.body, LedgerEntry, where=f"{subject} sequence {message.sequence}"))
        if message.sequence >= newest.sequence:
            break
    return PastLedger(entries)


async def read_fingerprints(log: Log, subjects: Subjects) -> dict[str, dict[str, str]]:
    """Values of the numerics fingerprints that the run's trainers have told, by digest; those whose events are gone are missing."""
    subject = subjects.events(NUMERICS_EVENT)
    newest = await log.last(subject)
    found: dict[str, dict[str, str]] = {}
    if newest is None:
        return found
    first = (await log.state(EVENTS)).first
    async for message in log.read(EVENTS, after=first - 1, subject=subject):
        detail = decode(message.body, Event, where=f"{subject} sequence {message.sequence}").detail
        found[str(detail["fingerprint"])] = {str(name): str(value) for name, value in detail["values"].items()}
        if message.sequence >= newest.sequence:
            break
    return found


async def read_initial_digest(log: Log) -> str:
    """Digest of version 0, the initial weights, from its manifest; an empty string when that is gone."""
    state = await log.state(WEIGHTS)
    if state.first != 1 or state.last == 0:
        return ""
    manifest = decode((await log.fetch(WEIGHTS, 1)).body, Manifest, where="the first manifest")
    return manifest.digest if manifest.version.number == 0 else ""
