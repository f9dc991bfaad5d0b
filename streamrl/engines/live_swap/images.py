"""A version's bytes as one file of this host's memory, for readers in other processes."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Manifest
from streamrl.weights.protocol import FileSource, Part

_SHARED_MEMORY = Path("/dev/shm")


def memory_folder() -> str | None:
    """Where files lie in memory; None where the system has no such place, which means its ordinary temporary folder."""
    return str(_SHARED_MEMORY) if os.access(_SHARED_MEMORY, os.W_OK) else None


@asynccontextmanager
async def collected(manifest: Manifest, parts: AsyncIterator[Part], *, engine: str) -> AsyncGenerator[FileSource]:
    """The concatenation of the parts as a file, which is gone afterwards.

    Raises:
        WeightSyncError: the parts are not all bytes of the version's tensors once.
    """
    descriptor, path = tempfile.mkstemp(prefix="streamrl-version-", dir=memory_folder())
    try:
        os.truncate(descriptor, manifest.nbytes)
        written = 0
        async for part in parts:
            await asyncio.to_thread(_write, descriptor, part)
            written += len(part.data)
        least = sum(spec.nbytes for spec in manifest.tensors)
        if not least <= written <= manifest.nbytes:
            raise WeightSyncError(
                f"expected {least} bytes of version {manifest.version}, got {written} at engine {engine}",
                hint="the transport lost or repeated a part; the next version is taken afresh",
            )
        yield FileSource(path)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _write(descriptor: int, part: Part) -> None:
    data, at = part.data, part.start
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count
