"""The end of a run, as its trainer leaves it behind: the key `ends/<trainer>`.

A run has finished when this key says so, and for no other reason: an event can be lost, and a process can end with exit code 0 for any.
The trainer writes it last, once its newest version is in the ledger, in a checkpoint, exported and published. It is written under the
trainer's fence and counts for as long as nobody has taken a higher one, so no trainer that has been replaced can end a run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from streamrl.bus.protocol import Bus, KeyEntry
from streamrl.bus.reading import read_key
from streamrl.config.tree import Config
from streamrl.errors import Fenced, SchemaError
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import RunEnd
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import PREFIX_ENDS, PREFIX_FENCES, Subjects


def end_key(trainer: str) -> str:
    """Key of the end that a trainer has come to."""
    return PREFIX_ENDS + trainer


def fence_of(entry: KeyEntry | None, key: str) -> int:
    """The fencing token in an entry of `fences/<trainer>`; 0: there is none.

    Raises:
        SchemaError: the key has something else than a token.
    """
    text = (entry.value or b"0") if entry else b"0"
    if not text.isdigit():
        raise SchemaError(
            f"expected a fencing token, a whole number, in key {key}, got {text[:80]!r}",
            hint="something else than a trainer wrote it: with `nats kv put` put the highest `fence` of the ledger's entries there",
            key=key,
        )
    return int(text)


async def read_fence(bus: Bus, trainer: str) -> int:
    """The highest fencing token that a trainer of this name has taken; 0: none has. Raises SchemaError as `fence_of`."""
    key = PREFIX_FENCES + trainer
    return fence_of(await bus.kv.get(key), key)


async def write_end(bus: Bus, trainer: str, end: RunEnd) -> None:
    """Say that the run has finished.

    Raises:
        Fenced: another trainer has taken over, and the end is that one's to tell.
    """
    fence = await read_fence(bus, trainer)
    if fence != end.fence:
        raise Fenced(
            f"trainer {trainer!r} with fence {end.fence} came to the run's end, but a trainer with fence {fence} has taken over",
            hint="another process trains this run; nothing is to be done here",
            fence=end.fence,
        )
    await bus.kv.put(end_key(trainer), encode(end))


async def read_end(bus: Bus, trainer: str) -> RunEnd | None:
    """The end that the newest trainer of this name has come to; None: it has not."""
    end = await read_key(bus.kv, end_key(trainer), RunEnd)
    return end if end is not None and end.fence == await read_fence(bus, trainer) else None


async def watch_end(bus: Bus, trainer: str, *, after: int) -> AsyncIterator[RunEnd]:
    """Yield each end that a trainer with a fence above `after` comes to, and that still counts; endless."""
    key = end_key(trainer)
    async for entry in bus.kv.watch_key(key):
        if entry.value is None:
            continue
        end = decode(entry.value, RunEnd, where=f"key {key}")
        if end.fence > after and end.fence == await read_fence(bus, trainer):
            yield end


async def finished_at(bus: Bus, config: Config) -> str:
    """Return the version at which the run reached `run.steps` and was evaluated; an empty string while something is left to do.

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
