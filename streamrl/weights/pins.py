"""Pins: a holder (an evaluation, say) keeps the bytes of one version from being retired, for as long as it renews the pin."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from streamrl.bus.protocol import KeyValue
from streamrl.errors import BusError
from streamrl.schemas.subjects import PREFIX_PINS, check_name
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)

TTL_S = 60.0
"""How long a pin outlives its holder."""
_KEY = re.compile(r"(\d{1,18})-(\d{1,18})/([A-Za-z0-9_-]+)", re.ASCII)


class Pin(msgspec.Struct, frozen=True):
    """One pin, or its end."""

    version: Version
    holder: str
    role: str = ""
    """Engines of this role are to serve the version; empty: its bytes are kept, and that is all."""
    live: bool = True
    """False when it was released or has expired."""


class Pins:
    """The pins of one policy: keys `pins/<policy>/<epoch>-<number>/<holder>` that expire unless they are put again."""

    def __init__(self, kv: KeyValue, policy: str) -> None:
        self._kv = kv
        self._prefix = f"{PREFIX_PINS}{check_name('policy', policy)}/"

    async def hold(self, version: Version, holder: str, *, ttl_s: float = TTL_S, role: str = "") -> None:
        """Keep the version's bytes for `ttl_s` seconds (>= 1) from now; call it again to keep them longer.

        A version that is being retired at this moment may still go: fetch it after pinning, and take a newer one if that fails.
        """
        await self._kv.put(self._key(version, holder), role.encode(), ttl_s=ttl_s)

    async def release(self, version: Version, holder: str) -> None:
        """Let go; no error if the pin has expired."""
        await self._kv.delete(self._key(version, holder))

    async def release_all(self, holder: str) -> None:
        """Let go of everything that is held under a name: what a process of this name that died has left."""
        for key in await self._kv.keys(self._prefix):
            if key.rpartition("/")[2] == holder:
                await self._kv.delete(key)

    @contextlib.asynccontextmanager
    async def held(self, version: Version, holder: str, *, ttl_s: float = TTL_S, role: str = "") -> AsyncGenerator[None]:
        """Hold the pin until the context is left, and let go. A holder that dies holds it for `ttl_s` seconds more."""
        await self.hold(version, holder, ttl_s=ttl_s, role=role)
        renewing = asyncio.create_task(self._renew(version, holder, ttl_s, role))
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            with contextlib.suppress(BusError):
                await self.release(version, holder)

    async def versions(self) -> frozenset[Version]:
        """All versions pinned by anybody."""
        return frozenset(pin.version for key in await self._kv.keys(self._prefix) if (pin := self._read(key)) is not None)

    async def watch(self) -> AsyncIterator[Pin]:
        """The present pins, then every change, for ever."""
        async for entry in self._kv.watch(self._prefix):
            if (pin := self._read(entry.key)) is not None:
                yield msgspec.structs.replace(pin, live=entry.value is not None, role=(entry.value or b"").decode(errors="replace"))

    async def _renew(self, version: Version, holder: str, ttl_s: float, role: str) -> None:
        while True:
            await asyncio.sleep(ttl_s / 3)
            try:
                await self.hold(version, holder, ttl_s=ttl_s, role=role)
            except BusError as error:
                # The pin lasts for two more tries; a bus that stays away longer keeps the version by itself: nobody can retire it.
                logger.warning("event=pin_not_renewed version=%s holder=%s error=%s", version, holder, error.message)

    def _key(self, version: Version, holder: str) -> str:
        return f"{self._prefix}{version.epoch}-{version.number}/{check_name('holder of a pin', holder)}"

    def _read(self, key: str) -> Pin | None:
        """The pin of a key; None for a key that is no pin's: engines and evaluators may store any, and nobody else stops for it."""
        found = _KEY.fullmatch(key.removeprefix(self._prefix))
        if found is None:
            logger.warning("event=pin_unreadable key=%s expected=a key such as 0-17/evaluator-0 action=passed_over", key)
            return None
        return Pin(Version(int(found[1]), int(found[2])), found[3])
