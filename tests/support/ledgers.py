"""Entries of a ledger that are written by hand."""

from typing import Any

from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.versions import Version


def entry(number: int = 1, *, epoch: int = 0, run: str = "made", **fields: Any) -> LedgerEntry:
    """Of the trainer `main`; it has trained and dropped nothing, has read `number` messages and granted 9 tasks but for what is given."""
    known = {"source": "main", "used": (), "cursor": number, "granted": 9, "retired": 0} | fields
    return LedgerEntry(run=run, trainer="main", version=Version(epoch, number), **known)
