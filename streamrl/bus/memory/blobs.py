"""Blobs in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from streamrl.errors import Conflict, NotFound, StreamFull


class MemoryBlobs:
    """See `streamrl.bus.protocol.Blobs`.

    Args:
        run: run id, for messages.
        max_bytes: byte budget of all blobs; negative: none.
        key: of that budget.
    """

    def __init__(self, run: str, max_bytes: int, key: str = "bus.blobs_bytes") -> None:
        self._key = key
        self._run = run
        self._max_bytes = max_bytes
        self._blobs: dict[str, bytes] = {}

    async def put(self, name: str, data: bytes | memoryview) -> str:
        body = bytes(data)
        present = self._blobs.get(name)
        if present is not None and present != body:
            raise Conflict(
                f"blob {name!r} is there already with other bytes",
                hint="blob names are never reused: put the version into the name",
                name=name,
            )
        used, _ = await self.room()
        if present is None and 0 <= self._max_bytes < used + len(body):
            raise StreamFull(
                f"put blob {name!r} ({len(body)} bytes): the byte budget is used up ({used} of {self._max_bytes} bytes)",
                hint=f"delete blobs, or raise {self._key}",
            )
        self._blobs[name] = body
        return hashlib.sha256(body).hexdigest()

    async def get(self, name: str) -> bytes:
        if name not in self._blobs:
            raise NotFound(f"expected a blob {name!r} in run {self._run}, got none", hint="was its version retired already?", name=name)
        return self._blobs[name]

    async def delete(self, name: str) -> None:
        self._blobs.pop(name, None)

    async def room(self) -> tuple[int, int]:
        return sum(len(blob) for blob in self._blobs.values()), self._max_bytes

    async def sweep(self, orphan_s: float) -> None:
        """Nothing is ever there in part."""

    async def names(self) -> Sequence[str]:
        return sorted(self._blobs)
