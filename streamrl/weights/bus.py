"""Transport `bus`: a version's bytes as blobs of a few megabytes on the message bus; reaches every host the bus reaches."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np

from streamrl.bus.protocol import Blobs
from streamrl.errors import BusError, NotFound, StreamFull, WeightSyncError
from streamrl.schemas.subjects import check_name
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest, PartRef
from streamrl.weights import manifest as manifests
from streamrl.weights.pins import Pins
from streamrl.weights.protocol import Part, Shard, Slice

logger = logging.getLogger(__name__)

PREFIX_BLOBS = "weights/"


class BusTransport:
    """Both ends of the transport. Blob names are `weights/<policy>/<epoch>-<number>/<random>/<part>` and never used twice.

    A publisher that dies leaves blobs that no manifest names; they go when their version is retired.

    Args:
        pins: whose versions `retire` spares; None: nobody's.
        part_bytes: bytes of one blob.
    """

    def __init__(self, blobs: Blobs, *, run: str, policy: str, pins: Pins | None = None, part_bytes: int = 4 << 20) -> None:
        self._blobs = blobs
        self._run = run
        self._policy = check_name("policy", policy)
        self._pins = pins
        self._part_bytes = part_bytes
        self._published: dict[Version, Manifest] = {}

    async def publish(self, version: Version, shards: Iterator[Shard]) -> Manifest:
        known = self._published.get(version)
        content = await asyncio.to_thread(manifests.Content, shards)
        if known is not None and await self.holds(known):
            manifests.check_same(known, content.digest)
            return known
        parts = await self._put(version, content)
        built = manifests.build(
            content, run=self._run, policy=self._policy, version=version, parts=parts, transport="bus", published_s=time.time()
        )
        self._published[version] = built
        return built

    async def fetch(self, manifest: Manifest, wants: Sequence[Slice]) -> AsyncIterator[Part]:
        where = f"{manifest.policy} {manifest.version}"
        for part, pieces in manifests.cover(manifest, wants):
            try:
                data = memoryview(await self._blobs.get(part.location))
            except NotFound as error:
                raise WeightSyncError(
                    f"{where}: expected blob {part.location}, got none of that name",
                    hint="a version is removed when newer ones are out: take a newer one",
                    version=str(manifest.version),
                ) from error
            except BusError as error:
                raise WeightSyncError(f"{where}: blob {part.location} cannot be read: {error.message}", hint=error.hint) from error
            digest = await asyncio.to_thread(_sha256, data)
            if len(data) != part.nbytes or digest != part.sha256:
                raise WeightSyncError(
                    f"{where}: expected {part.nbytes} bytes with sha256 {part.sha256[:12]}... in blob {part.location}, "
                    f"got {len(data)} with {digest[:12]}...",
                    hint="a newer version or a restart of the trainer brings good bytes",
                )
            for piece in pieces:
                first = piece.start - part.offset
                yield Part(piece.start, data[first : first + piece.nbytes])

    async def holds(self, manifest: Manifest) -> bool:
        return {part.location for part in manifest.parts} <= set(await self._blobs.names())

    async def retire(self, older_than: Version) -> None:
        pinned = await self._pins.versions() if self._pins is not None else frozenset[Version]()
        for version in [version for version in self._published if version < older_than and version not in pinned]:
            del self._published[version]
        for name in await self._blobs.names():
            version = self._version(name)
            if version is not None and version < older_than and version not in pinned:
                await self._blobs.delete(name)
                logger.debug("event=weights_retired policy=%s version=%s blob=%s", self._policy, version, name)

    async def _put(self, version: Version, content: manifests.Content) -> tuple[PartRef, ...]:
        prefix = f"{PREFIX_BLOBS}{self._policy}/{version.epoch}-{version.number}/{secrets.token_hex(6)}"
        parts: list[PartRef] = []
        try:
            for index, piece in enumerate(manifests.cut(content.nbytes, self._part_bytes)):
                data = np.empty(piece.nbytes, np.uint8)
                await asyncio.to_thread(content.fill, piece.start, data)
                name = f"{prefix}/{index:05d}"
                digest = await self._blobs.put(name, data.data)
                parts.append(PartRef(location=name, offset=piece.start, nbytes=piece.nbytes, sha256=digest))
        except StreamFull as error:
            for part in parts:
                await self._blobs.delete(part.location)
            raise WeightSyncError(
                f"cannot store {content.nbytes} bytes of {self._policy} {version} on the bus: {error.message}",
                hint="raise bus.blobs_bytes or lower weights.keep",
            ) from error
        return tuple(parts)

    def _version(self, name: str) -> Version | None:
        """The version a blob of this policy belongs to; None for all other blobs."""
        fields = name.removeprefix(PREFIX_BLOBS).split("/")
        if not name.startswith(PREFIX_BLOBS) or len(fields) != 4 or fields[0] != self._policy:
            return None
        epoch, _, number = fields[1].partition("-")
        return Version(int(epoch), int(number)) if epoch.isdigit() and number.isdigit() else None


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
