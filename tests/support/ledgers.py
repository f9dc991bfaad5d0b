"""Entries of a ledger that are written by hand."""

from typing import Any

from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.versions import Version


def entry(number: int = 1, *, epoch: int = 0, run: str = "made", **fields: Any) -> LedgerEntry:
    """Return one of the trainer `main` that trained and dropped nothing, but for what is given."""
    known = {"source": "main", "used": (), "cursor": number, "granted": 9, "retired": 0} | fields
    return LedgerEntry(run=run, trainer="main", version=Version(epoch, number), **known)
