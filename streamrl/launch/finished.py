"""Whether a run has nothing left to do."""

from __future__ import annotations

from typing import Any

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.runtime.run_end import read_end
from streamrl.schemas.codec import decode
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects


async def finished_at(bus: Bus, config: Config) -> str:
    """The version at which the run reached `run.steps`, evaluated and all; an empty string while something is left to do.

    A run that was ended by another limit, which may be raised, has something left.
    """
    subjects = Subjects(config.run.name)
    end = await read_end(bus, config.trainer.name)
    newest = await bus.last(subjects.ledger(config.trainer.name))
    if end is None or newest is None or end.steps < config.run.steps:
        return ""
    if decode(newest.body, LedgerEntry, where="the ledger's end").version != end.version:
        return ""
    version = str(end.version)
    if config.data.heldout or config.evaluation.sets:
        evaluated = await _last(bus, subjects.events("evaluation"))
        if evaluated is None or not evaluated.get("final") or evaluated.get("version") != version:
            return ""
    return version


async def _last(bus: Bus, subject: str) -> dict[str, Any] | None:
    message = await bus.last(subject)
    return None if message is None else decode(message.body, Event, where=f"the newest of {subject}").detail
