"""Keys in memory: revisions, compare-and-set, expiry, watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from streamrl.bus.protocol import KeyEntry
from streamrl.bus.topology import check_key, check_ttl
from streamrl.errors import Conflict, StreamFull


class MemoryKeys:
    """See `streamrl.bus.protocol.KeyValue`.

    Args:
        max_bytes: of all values; a store that would exceed it raises StreamFull. -1: no limit.
    """

    def __init__(self, max_bytes: int = -1) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: dict[str, KeyEntry] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._revision = 0
        self._watchers: dict[asyncio.Queue[KeyEntry], Callable[[str], bool]] = {}

    async def get(self, key: str) -> KeyEntry | None:
        return self._entries.get(check_key(key))

    async def put(self, key: str, value: bytes, *, expect: int | None = None, ttl_s: float | None = None) -> int:
        present = self._entries.get(check_key(key))
        lifetime = None if ttl_s is None else check_ttl(ttl_s)
        actual = present.revision if present else 0
        if expect is not None and expect != actual:
            raise Conflict(
                f"put key {key}: expected the last sequence {expect}, got {actual}",
                hint="another writer was first",
                expected=expect,
                actual=actual,
            )
        grown = self._bytes + len(value) - len((present and present.value) or b"")
        if 0 <= self._max_bytes < grown:
            raise StreamFull(f"put key {key}: expected {len(value)} bytes to fit {self._max_bytes}, of which {self._bytes} are used")
        self._change(key, bytes(value))
        if lifetime is not None:
            self._expiries[key] = asyncio.get_running_loop().call_later(lifetime, self._change, key, None)
        return self._revision

    async def delete(self, key: str) -> None:
        if check_key(key) in self._entries:
            self._change(key, None)

    async def keys(self, prefix: str = "") -> Sequence[str]:
        return sorted(key for key in self._entries if key.startswith(prefix))

    async def values(self, prefix: str) -> Mapping[str, bytes]:
        check_key(prefix.removesuffix("/"))
        return {key: entry.value or b"" for key, entry in sorted(self._entries.items()) if key.startswith(prefix)}

    async def remove(self, prefix: str) -> None:
        check_key(prefix.removesuffix("/"))
        for key in [key for key in self._entries if key.startswith(prefix)]:
            self._change(key, None)

    async def size(self) -> int:
        return sum(len(entry.value or b"") for entry in self._entries.values())

    def watch(self, prefix: str) -> AsyncIterator[KeyEntry]:
        return self._watch(lambda key: key.startswith(prefix))

    def watch_key(self, key: str) -> AsyncIterator[KeyEntry]:
        return self._watch(check_key(key).__eq__)

    async def _watch(self, wanted: Callable[[str], bool]) -> AsyncIterator[KeyEntry]:
        changes: asyncio.Queue[KeyEntry] = asyncio.Queue()
        for entry in sorted(self._entries.values(), key=lambda entry: entry.revision):
            if wanted(entry.key):
                changes.put_nowait(entry)
        self._watchers[changes] = wanted
        try:
            while True:
                yield await changes.get()
        finally:
            del self._watchers[changes]

    def _change(self, key: str, value: bytes | None) -> None:
        """Set or (None) remove a key, and tell the watchers."""
        expiry = self._expiries.pop(key, None)
        if expiry is not None:
            expiry.cancel()
        self._revision += 1
        before = self._entries.get(key)
        self._bytes += len(value or b"") - len((before and before.value) or b"")
        entry = KeyEntry(key, value, self._revision)
        if value is None:
            self._entries.pop(key, None)
        else:
            self._entries[key] = entry
        for changes, wanted in self._watchers.items():
            if wanted(key):
                changes.put_nowait(entry)

    def close(self) -> None:
        """Stop the expiry timers."""
        for expiry in self._expiries.values():
            expiry.cancel()
