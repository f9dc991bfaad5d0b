"""Transport `bus`: a version's bytes as blobs of a few megabytes on the message bus; reaches every host the bus reaches.

With `anchor_every` above 1 most versions are only what changed since the one before, and a reader keeps an image of the version it
took last, to which the changes are applied. Blobs are `weights/<policy>/<version>/<upload>/<whole or from-<version>>/<part>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from streamrl.bus.protocol import Blobs
from streamrl.errors import WeightSyncError
from streamrl.schemas.subjects import check_name
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Contribution, Link, Manifest
from streamrl.system import cores
from streamrl.weights import manifest as manifests
from streamrl.weights import ranks
from streamrl.weights.blobs import Gone, PartStore
from streamrl.weights.changes import Before, Range, Source, join
from streamrl.weights.image import HostImage
from streamrl.weights.links import BlobName, anchor_due, needed, routes, window
from streamrl.weights.pins import Pins
from streamrl.weights.protocol import FileSource, Part, Shard, Slice

logger = logging.getLogger(__name__)

MAX_PARTS = 512
"""Parts of one version at most, so that its manifest stays small: larger versions have larger parts."""
READ_BYTES = 8 << 20
"""Bytes of one part that is read from an image."""
MAX_THREADS = 8


class BusTransport:
    """Both ends of the transport. Blob names are never used twice.

    A publisher that dies leaves blobs that no manifest names; they go when their version is retired. One that starts has no version
    to compare with, and begins with an anchor.

    Args:
        pins: whose versions `retire` spares; None: nobody's.
        part_bytes: bytes of one blob.
        anchor_every: versions from one that is stored whole to the next at most; 1: every version is.
        threads: for comparing, compressing and applying; None: as many as there are processors, up to `MAX_THREADS`.
    """

    def __init__(
        self,
        blobs: Blobs,
        *,
        run: str,
        policy: str,
        pins: Pins | None = None,
        part_bytes: int = 4 << 20,
        anchor_every: int = 1,
        threads: int | None = None,
    ) -> None:
        self._blobs = blobs
        self._store = PartStore(blobs)
        self._run = run
        self._policy = check_name("policy", policy)
        self._pins = pins
        self._part_bytes = part_bytes
        self._anchor_every = anchor_every
        self._pool = ThreadPoolExecutor(threads or min(MAX_THREADS, cores()), thread_name_prefix="weights")
        self._before = Before(self._pool)
        self._published: dict[Version, Manifest] = {}
        self._contributed: dict[Version, Contribution] = {}
        self._links: tuple[Link, ...] = ()
        """Of the versions published here, oldest first."""
        self._image = HostImage(policy, self._pool)
        self._reading = asyncio.Lock()

    async def publish(self, version: Version, shards: Iterator[Shard]) -> Manifest:
        known = self._published.get(version)
        content = await asyncio.to_thread(manifests.Content, shards)
        if known is not None:
            manifests.check_same(known, content.digest)
            if await self.holds(known):
                return known
        ranges = [_range(spec.name, spec.dtype, 0, spec.nbytes, spec.offset) for spec in content.tensors]
        own = await self._put(version, content, ranges)
        self._links = window([*(link for link in self._links if link.version < version), *own])
        built = manifests.build(
            content, run=self._run, policy=self._policy, version=version, parts=own[0].parts, transport="bus", published_s=time.time()
        )
        if self._anchor_every > 1:
            built = msgspec.structs.replace(built, kind=manifests.kind_of(own[0]), parent=own[0].parent, links={"bus": self._links})
        self._published[version] = built
        return built

    async def contribute(self, version: Version, shards: Iterator[Shard], *, moved: Callable[[], None] | None = None) -> Contribution:
        content = await asyncio.to_thread(ranks.RankContent, shards)
        known = self._contributed.get(version)
        if known is not None:
            if known.slices != content.slices:
                raise WeightSyncError(f"{self._policy} {version}: expected the slices contributed before, got others")
            stored = set(await self._blobs.names())
            if all(part.location in stored for link in known.links for part in link.parts):
                return known
        ranges = [
            Range(one.name, one.dtype, manifests.ITEM_BYTES[one.dtype], one.first, one.count, start)
            for one, start in zip(content.slices, content.starts, strict=True)
        ]
        own = await self._put(version, content, ranges, alone=False, moved=moved) if content.nbytes else ()
        made = Contribution(run=self._run, policy=self._policy, version=version, slices=content.slices, links=own, transport="bus")
        self._contributed = {version: made}
        return made

    def merge(self, contributions: Sequence[Contribution]) -> Manifest:
        merged = ranks.merge(contributions, published_s=time.time())
        version = merged.version
        self._links = window([*(link for link in self._links if link.version < version), *merged.links["bus"]])
        self._published[version] = msgspec.structs.replace(merged, links={"bus": self._links})
        return self._published[version]

    async def fetch(self, manifest: Manifest, wants: Sequence[Slice]) -> AsyncIterator[Part]:
        """As the protocol says. Where there are deltas the parts are views of the image, valid until the next `fetch` or `source`."""
        if not manifest.links.get("bus") and not manifest.pieces:
            async for part in self._fetch_whole(manifest, wants):
                yield part
            return
        manifests.check_wants(manifest, wants)
        async with self._brought(manifest) as image:
            for want in wants:
                for piece in manifests.cut(want.nbytes, READ_BYTES):
                    yield Part(want.start + piece.start, image.view(want.start + piece.start, piece.nbytes))

    @contextlib.asynccontextmanager
    async def source(self, manifest: Manifest) -> AsyncGenerator[FileSource]:
        async with self._brought(manifest) as image:
            yield FileSource(image.path)

    async def holds(self, manifest: Manifest) -> bool:
        stored = set(await self._blobs.names())
        held = self._image.held
        return any(
            all(part.location in stored for link in route for part in link.parts)
            for route in routes(_links(manifest), manifest.version, held)
        )

    async def retire(self, older_than: Version) -> None:
        pinned = await self._pins.versions() if self._pins is not None else frozenset[Version]()
        for version in [version for version in self._published if version < older_than and version not in pinned]:
            del self._published[version]
        stored = {name: blob for name in await self._blobs.names() if (blob := BlobName.parse(name)) and blob.policy == self._policy}
        kept = needed(stored.values(), {blob.version for blob in stored.values() if blob.version >= older_than} | pinned)
        for name, blob in stored.items():
            if blob.version not in kept:
                await self._blobs.delete(name)
                logger.debug("event=weights_retired policy=%s version=%s blob=%s", self._policy, blob.version, name)

    def close(self) -> None:
        """Free the image and the threads; the blobs stay."""
        self._before.forget()
        self._image.close()
        self._pool.shutdown(wait=False)

    async def _put(
        self,
        version: Version,
        content: Source,
        ranges: Sequence[Range],
        *,
        alone: bool = True,
        moved: Callable[[], None] | None = None,
    ) -> tuple[Link, ...]:
        """Store `content` whole, as changes, or both, the whole first; `moved` is called for each part that is stored.

        Several ranks must choose alike, so theirs is a matter of counting versions; one `alone` looks at the bytes too.
        """
        upload = secrets.token_hex(6)
        limit = max(self._part_bytes, -(-content.nbytes // MAX_PARTS))
        what = f"{self._policy} {version}"
        whole_name = BlobName(self._policy, version, upload, None)
        if self._anchor_every == 1:
            parts = await self._store.put_content(whole_name.prefix, content, limit, what=what, moved=moved)
            return (Link(version=version, parts=parts),)
        parent = self._before.version
        blocks = await asyncio.to_thread(self._before.replace, version, content, ranges)
        links: list[Link] = []
        nbytes = sum(map(len, blocks or ()))
        past = [link for link in self._links if link.version < version]
        due = anchor_due(past, nbytes, content.nbytes if alone else math.inf, self._anchor_every)
        # Beside an anchor, changes are stored only if they spare its readers most of it.
        smaller = blocks is not None and (not alone or nbytes < content.nbytes / (2 if due else 1))
        try:
            if due or not smaller:
                whole = await self._store.put_content(whole_name.prefix, content, limit, what=what, moved=moved)
                links.append(Link(version=version, parts=whole))
            if blocks is not None and smaller:
                name = BlobName(self._policy, version, upload, parent)
                joined = [memoryview(part) for part in await asyncio.to_thread(join, blocks, limit)]
                links.append(Link(version=version, parent=parent, parts=await self._store.put(name.prefix, joined, what=what, moved=moved)))
        except BaseException:
            # What readers will hold is not what is held here: the next version must not be made from it.
            self._before.forget()
            raise
        if not alone:
            self._links = window([*past, *links])
        logger.info(
            "event=weights_stored policy=%s version=%s whole_bytes=%d changed_bytes=%d anchor=%s",
            self._policy,
            version,
            content.nbytes,
            nbytes,
            links[0].parent is None,
        )
        return tuple(links)

    async def _fetch_whole(self, manifest: Manifest, wants: Sequence[Slice]) -> AsyncIterator[Part]:
        covered = list(manifests.cover(manifest, wants))
        parts = [part for part, _ in covered]
        async with contextlib.aclosing(self._store.get(parts, what=f"{manifest.policy} {manifest.version}")) as stored:
            index = 0
            async for _, data in stored:
                part, pieces = covered[index]
                for piece in pieces:
                    first = piece.start - part.offset
                    yield Part(piece.start, data[first : first + piece.nbytes])
                index += 1

    @contextlib.asynccontextmanager
    async def _brought(self, manifest: Manifest) -> AsyncGenerator[HostImage]:
        """The image with the manifest's version in it, as it is until the context is left."""
        async with self._reading:
            await asyncio.to_thread(self._image.lay_out, manifest)
            if self._image.held != manifest.version:
                await self._bring(manifest)
            yield self._image

    async def _bring(self, manifest: Manifest) -> None:
        ways = routes(_links(manifest), manifest.version, self._image.held)
        for index, way in enumerate(ways):
            if way[0].parent is not None and way[0].parent != self._image.held:
                continue
            try:
                for link in way:
                    await self._follow(manifest, link)
                break
            except Gone:
                # The changes since an older version may be retired while an anchor that is no older is there.
                if index == len(ways) - 1:
                    raise
        await asyncio.to_thread(self._image.check, manifest)

    async def _follow(self, manifest: Manifest, link: Link) -> None:
        started = time.monotonic()
        async with contextlib.aclosing(self._store.get(link.parts, what=f"{manifest.policy} {link.version}")) as stored:
            if link.parent is None:
                ranks.check_places(msgspec.structs.replace(manifest, parts=link.parts, pieces=link.pieces))
                async for part, data in stored:
                    await asyncio.to_thread(self._image.write, link, part.offset, data)
                self._image.reached(link.version)
            else:
                # All of them before the first is applied: a part that cannot be had leaves the image as it is.
                await asyncio.to_thread(self._image.apply, link, [data async for _, data in stored])
        logger.info(
            "event=weights_fetched policy=%s version=%s from=%s bytes=%d took_s=%.3f",
            self._policy,
            link.version,
            link.parent or "anchor",
            link.nbytes,
            time.monotonic() - started,
        )


def _links(manifest: Manifest) -> tuple[Link, ...]:
    return manifest.links.get("bus") or (Link(version=manifest.version, parts=manifest.parts, pieces=manifest.pieces),)


def _range(name: str, dtype: str, first: int, nbytes: int, start: int) -> Range:
    item = manifests.ITEM_BYTES[dtype]
    return Range(name, dtype, item, first, nbytes // item, start)
