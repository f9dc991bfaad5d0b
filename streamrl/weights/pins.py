"""Pins: a holder (an evaluation, say) keeps the bytes of one version from being retired, for as long as it renews the pin."""

from __future__ import annotations

from streamrl.bus.protocol import KeyValue
from streamrl.errors import SchemaError
from streamrl.schemas.subjects import check_name
from streamrl.schemas.versions import Version

PREFIX_PINS = "pins/"


class Pins:
    """The pins of one policy: keys `pins/<policy>/<epoch>-<number>/<holder>` that expire unless they are put again."""

    def __init__(self, kv: KeyValue, policy: str) -> None:
        self._kv = kv
        self._prefix = f"{PREFIX_PINS}{check_name('policy', policy)}/"

    async def hold(self, version: Version, holder: str, *, ttl_s: float = 60.0) -> None:
        """Keep the version's bytes for `ttl_s` seconds (>= 1) from now; call it again to keep them longer.

        A version that is being retired at this moment may still go: fetch it after pinning, and take a newer one if that fails.
        """
        await self._kv.put(self._key(version, holder), b"", ttl_s=ttl_s)

    async def release(self, version: Version, holder: str) -> None:
        """Let go; no error if the pin has expired."""
        await self._kv.delete(self._key(version, holder))

    async def versions(self) -> frozenset[Version]:
        """All versions pinned by anybody."""
        keys = await self._kv.keys(self._prefix)
        return frozenset(_version(key.removeprefix(self._prefix)) for key in keys)

    def _key(self, version: Version, holder: str) -> str:
        return f"{self._prefix}{version.epoch}-{version.number}/{check_name('holder of a pin', holder)}"


def _version(rest: str) -> Version:
    text = rest.split("/", 1)[0]
    epoch, _, number = text.partition("-")
    if not (epoch.isdigit() and number.isdigit()):
        raise SchemaError(f"expected the key of a pin such as 0-17/evaluator-0, got {rest!r}")
    return Version(int(epoch), int(number))
