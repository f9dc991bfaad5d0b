"""What the ledger says has become of a message of the sample stream, or of a task."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import msgspec

from streamrl.bus.protocol import Bus
from streamrl.consumers.training.ledger import Ledger, open_ledger
from streamrl.consumers.training.spilled_drops import whole
from streamrl.history.dead_letters import DeadLetters
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects

POLL_S = 0.2


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the message at `sequence`."""

    sequence: int
    state: Literal["waiting", "accepted", "trained", "dropped", "quarantined"]
    """`waiting`: no ledger entry reaches it yet. `accepted`: the fold has taken it in and decided nothing against it, so far."""
    detail: str = ""

    @property
    def line(self) -> str:
        """For a person."""
        return f"sequence {self.sequence}: {self.state}{', ' + self.detail if self.detail else ''}"


class Fates:
    """Reads a run's ledger and dead letters as often as asked; writes nothing.

    Args:
        bus: connected to the run.
        subjects: of the run.
        trainer: whose ledger counts.
    """

    def __init__(self, bus: Bus, subjects: Subjects, trainer: str) -> None:
        self._bus = bus
        self._subjects = subjects
        self._trainer = trainer
        self._whole: dict[str, LedgerEntry] = {}
        """Entries whose drops were in a blob, by its name."""

    async def of_message(self, sequence: int, *, task: int | None = None, wait_s: float = 0.0) -> Fate:
        """The fate of a message, waiting at most `wait_s` for the trainer to decide on it.

        Args:
            sequence: on the sample stream.
            task: the task that it belongs to, if known: what comes for a task that had ended before needs no wait.
            wait_s: seconds.
        """
        deadline = time.monotonic() + wait_s
        while True:
            fate = await self._look(sequence, task)
            if fate.state != "waiting" or time.monotonic() >= deadline:
                return fate
            await asyncio.sleep(POLL_S)

    async def _ledger(self) -> Ledger:
        ledger = await open_ledger(self._bus, self._subjects, self._trainer)
        for number, entry in ledger.entries.items():
            if not isinstance(entry.spilled, msgspec.UnsetType):
                blob = entry.spilled.blob
                self._whole[blob] = ledger.entries[number] = self._whole.get(blob) or await whole(self._bus.blobs, entry)
        return ledger

    async def _look(self, sequence: int, task: int | None) -> Fate:
        ledger = await self._ledger()
        reached = False
        for number, entry in sorted(ledger.entries.items()):
            for group in entry.used:
                if sequence in group.sequences:
                    return Fate(sequence=sequence, state="trained", detail=f"task {group.task} into version {entry.version}")
            drops = [drop for drop in entry.drops if drop.sequence == sequence]
            if drops:
                reasons = "; ".join(f"{drop.reason}{': ' + drop.detail if drop.detail else ''}" for drop in drops)
                poison = any(drop.reason == "poison" and not drop.rollouts for drop in drops)
                return Fate(sequence=sequence, state="quarantined" if poison else "dropped", detail=f"{reasons} (before version {number})")
            reached = reached or entry.cursor >= sequence
        letter = await DeadLetters(self._bus, self._subjects).find(sequence)
        if letter is not None:
            return Fate(sequence=sequence, state="quarantined", detail=letter.reason)
        if reached:
            return Fate(sequence=sequence, state="accepted", detail="it is in the books with its group, whose batch is still to come")
        ended = _end_of(ledger, task) if task is not None else ""
        if ended:
            return Fate(sequence=sequence, state="dropped", detail=f"it comes after the end of its task {task}, which was {ended}")
        return Fate(sequence=sequence, state="waiting", detail="the ledger has not come to it yet")


def _end_of(ledger: Ledger, task: int) -> str:
    for _, entry in sorted(ledger.entries.items()):
        if any(group.task == task for group in entry.used):
            return f"trained into version {entry.version}"
        for drop in entry.drops:
            if drop.task == task and drop.retires:
                return f"dropped as {drop.reason} before version {entry.version}"
    return ""
