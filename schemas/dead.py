"""Quarantined messages."""

from __future__ import annotations

import msgspec


class DeadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A message that could not be used, with the reason and its original bytes."""

    stream: str
    sequence: int
    subject: str
    reason: str
    body: bytes
    headers: dict[str, str] = {}
    task: int | None = None
