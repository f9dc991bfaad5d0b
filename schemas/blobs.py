"""What lies beside the sample stream, by name."""

from __future__ import annotations

import msgspec


class BlobRef(msgspec.Struct, frozen=True):
    """A slice of rows of a blob: large columns (routed experts, images) stay out of the stream."""

    name: str
    sha256: str
    """Of the whole blob, hex."""
    start_row: int = 0
    num_rows: int = 0
