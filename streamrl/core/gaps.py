"""Versions that were made and lost: how the fold goes on where the ledger has a gap."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from streamrl.core.state import FoldState
from streamrl.schemas.ledger import LedgerEntry


def bridged(state: FoldState, entry: LedgerEntry) -> FoldState:
    """The state at the version that is gone on from after a gap, whose entry this is; any other state is left as it is.

    The epoch of the entry begins, with this version as its first (`Gap.first`), and what had been granted counts. Samples of versions that
    were lost are known as such from here on: their group ends as `lost_version`, and they are not taken for invented ones.
    """
    gap, version = entry.gap, entry.version
    if gap is UNSET or version.number != state.version.number or state.epochs[-1].epoch >= version.epoch:
        return state
    first = gap.first_after(version)
    for epoch in range(state.epochs[-1].epoch + 1, version.epoch + 1):
        state = state.with_epoch(epoch, first, gap.highest.number)
    known_as = version if first == version.number else state.version
    state = replace(state, version=known_as, lost=max(state.lost, gap.highest.number))
    return state.with_grant(max(state.granted, entry.granted))
