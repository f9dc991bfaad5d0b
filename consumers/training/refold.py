"""Folding a stream again by a ledger, with nothing trained: up to where the stream still is what the versions were made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import UNSET
from msgspec.structs import replace

from streamrl.bus.protocol import Log
from streamrl.bus.reading import stretch
from streamrl.consumers.training.reader import open_message
from streamrl.consumers.training.spilled_drops import whole
from streamrl.consumers.training.steps import mean_reward
from streamrl.core.assembly import used
from streamrl.core.fold import close, fold, trained
from streamrl.core.gaps import bridged
from streamrl.core.state import FoldConfig, FoldState
from streamrl.schemas.ledger import Drop, LedgerEntry, decided_by
from streamrl.schemas.subjects import SAMPLES


async def last_agreed(
    log: Log, state: FoldState, entries: Mapping[int, LedgerEntry], gaps: Iterable[LedgerEntry], config: FoldConfig
) -> int:
    """Number of the last version behind `state` up to which the stream gives the ledger's batches and drops.

    An entry does not name every message that it was made of: a reward that was applied, or a mark, is in no list of it. A reward that
    changes neither a batch nor its mean is not seen here; the digest of its version then differs.

    Args:
        log: whose sample stream goes back to `state`.
        state: what the trainer goes on from.
        entries: the line of versions.
        gaps: entries of gaps.
        config: the decisions.
    """
    number, known = state.version.number, tuple(gaps)
    end = (await log.state(SAMPLES)).last
    newest = number
    while (entry := entries.get(newest + 1)) is not None and entry.cursor <= end:
        newest += 1
    if newest == number:
        return number
    messages = stretch(log, SAMPLES, first=state.cursor + 1, last=entries[newest].cursor)
    while True:
        for gap in known:
            state = bridged(state, gap)
        if number == newest:
            return number
        entry = await whole(log.blobs, entries[number + 1])
        while state.cursor < entry.cursor:
            message = await anext(messages, None)
            if message is None:
                return number
            state, _ = fold(state, open_message(message).record, config)
        after = _made(state, entry, config)
        if after is None:
            return number
        state, number = after, number + 1


def _made(state: FoldState, entry: LedgerEntry, config: FoldConfig) -> FoldState | None:
    """The state after the version of an entry; None where another batch closes there, or none."""
    batch = close(state, config) if state.cursor == entry.cursor else None
    if batch is None or used(batch) != entry.used or _places(state.drops) != _places(entry.drops):
        return None
    if entry.reward is not UNSET and entry.reward != mean_reward(batch, state):
        return None
    return replace(trained(state, batch, config, warm=entry.warm, score=decided_by(entry).score), version=entry.version)


def _places(drops: Iterable[Drop]) -> list[tuple[int, int, tuple[int, ...], bool]]:
    """Drops without their words, which may be those of another build."""
    return [(drop.sequence, drop.task, drop.rollouts, drop.retires) for drop in drops]
