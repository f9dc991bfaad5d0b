"""What a replay reads from a log: the ledger, what events and manifests tell of its run, and the pending groups of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from streamrl.bus.protocol import Log, Message
from streamrl.bus.reading import stretch
from streamrl.consumers.training.carried import fetch_messages, held, oldest_read_again, read_carried
from streamrl.consumers.training.checkpoints import check_stream
from streamrl.core.state import FoldState
from streamrl.schemas.codec import decode
from streamrl.schemas.events import NUMERICS_EVENT, Event
from streamrl.schemas.ledger import LedgerEntry, ranges, take_entry
from streamrl.schemas.subjects import EVENTS, LEDGER, WEIGHTS, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest

if TYPE_CHECKING:
    from streamrl.schemas.sample_batch import SampleBatch


class PastLedger:
    """A trainer's entries by version number, of the newest epoch. Satisfies `streamrl.consumers.training.steps.Entries`."""

    def __init__(self, entries: list[LedgerEntry]) -> None:
        self.entries: dict[int, LedgerEntry] = {}
        self.gaps: dict[int, LedgerEntry] = {}
        """Entries of gaps, by the epoch that begins with them."""
        for entry in entries:
            take_entry(self.entries, self.gaps, entry)

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

    def lost(self, above: int, through: int | None, highest: Version) -> list[str]:
        """What is missing of the versions `above` < number <= `through` (None: to the end), in words.

        Args:
            above: version number.
            through: version number.
            highest: the highest version that is known to have been made; one of an epoch before a gap counts no more.
        """
        others = highest.number if highest.epoch >= max(self.gaps, default=0) else 0
        end = max(others, max(self.entries, default=0)) if through is None else through
        found = [
            f"version {entry.version} goes on after a gap: versions up to {entry.gap.highest} were made and are lost ({entry.gap.lost})"
            for _, entry in sorted(self.gaps.items())
            if entry.gap is not UNSET and (above < entry.version.number < end or above == 0)
        ]
        missing = ranges(number for number in range(above + 1, end + 1) if number not in self.entries)
        rows = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in missing)
        return [*found, f"the ledger has no entry for version {rows}"] if missing else found


async def read_past(log: Log, subjects: Subjects, trainer: str) -> PastLedger:
    """Everything that a trainer's ledger has at this moment, spilled drops left where they are."""
    subject = subjects.ledger(trainer)
    newest = await log.last(subject)
    first = (await log.state(LEDGER)).first
    messages = stretch(log, LEDGER, first=first, last=newest.sequence if newest else 0, subject=subject)
    return PastLedger([decode(one.body, LedgerEntry, where=f"{subject} sequence {one.sequence}") async for one in messages])


async def read_fingerprints(log: Log, subjects: Subjects) -> dict[str, dict[str, str]]:
    """Values of the numerics fingerprints that the run's trainers have told, by digest; those whose events are gone are missing."""
    subject = subjects.events(NUMERICS_EVENT)
    newest = await log.last(subject)
    found: dict[str, dict[str, str]] = {}
    first = (await log.state(EVENTS)).first
    async for message in stretch(log, EVENTS, first=first, last=newest.sequence if newest else 0, subject=subject):
        detail = decode(message.body, Event, where=f"{subject} sequence {message.sequence}").detail
        found[str(detail["fingerprint"])] = {str(name): str(value) for name, value in detail["values"].items()}
    return found


async def read_initial_digest(log: Log) -> str:
    """Digest of version 0, the initial weights, from its manifest; an empty string when that is gone."""
    state = await log.state(WEIGHTS)
    if state.first != 1 or state.last == 0:
        return ""
    manifest = decode((await log.fetch(WEIGHTS, 1)).body, Manifest, where="the first manifest")
    return manifest.digest if manifest.version.number == 0 else ""


class Pending(msgspec.Struct, frozen=True):
    """What a stepper that goes on from a state needs."""

    identity: str
    """Of the sample stream."""
    carried: dict[int, Message]
    """Messages that came from the checkpoint; they may be gone from the stream."""
    samples: dict[int, SampleBatch]
    """Decoded messages of the pending groups, by sequence."""


async def read_pending(log: Log, state: FoldState, checkpoint: Path | None, *, identity: str = "") -> Pending:
    """Check that the stream goes back far enough for `state`, and gather the messages of its pending groups.

    Args:
        log: the stream.
        state: where a reader goes on from.
        checkpoint: the directory it was loaded from; None for a beginning.
        identity: of the stream that the state was made from; empty if it is not known.

    Raises:
        LogTruncated: it is another stream, or it does not hold what is needed any more.
    """
    from streamrl.consumers.training.reader import open_samples  # Arrow takes 25 MB, and a supervisor reads no samples

    carried = read_carried(checkpoint) if checkpoint is not None else {}
    oldest = oldest_read_again(state, carried)
    found = await check_stream(log, cursor=state.cursor, oldest_needed=oldest, identity=identity, cursor_s=state.cursor_s)
    messages = carried | await fetch_messages(log, held(state) - carried.keys())
    return Pending(found, carried, open_samples(messages[sequence] for sequence in sorted(held(state))))
