"""Quarantined messages."""

from __future__ import annotations

import msgspec


class DeadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A message that could not be used, with the reason and its original bytes."""

    stream: str
    sequence: int
    """Of the message on `stream`; the ledger's drops and the operator name the letter by it."""
    subject: str
    reason: str
    body: bytes
    """The original bytes; empty when they are in `blob`, because a record around them would not fit a message."""
    headers: dict[str, str] = {}
    task: int | None = None
    """The task that ended with it, or that its header names; None when it is not known."""
    blob: str = ""
    """Name of the blob with the body."""
    num_bytes: int | None = None
    """Size of the body; None in records of older versions, which have it in `body`."""
    time_s: float = 0.0
    """Unix seconds at which the server stored the message; for people only."""
