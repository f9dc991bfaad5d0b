"""The digest of a message's body: what was published is what is read, or the message is quarantined."""

from __future__ import annotations

import hashlib


def body_digest(body: bytes | memoryview) -> str:
    """SHA-256 of a body, 64 hex digits; the value of the header `Streamrl-Digest`."""
    return hashlib.sha256(body).hexdigest()
