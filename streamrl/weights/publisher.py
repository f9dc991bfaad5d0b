"""The trainer's publisher: takes a snapshot from the training thread and publishes it while training goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import msgspec

from streamrl.bus.protocol import Bus, Message, Receipt
from streamrl.errors import LogTruncated, NotFound, SchemaError, WeightSyncError
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.subjects import WEIGHTS, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.weights import manifest as manifests
from streamrl.weights.protocol import Shard, WeightTransport

logger = logging.getLogger(__name__)

MAX_WAITING = 4
"""Snapshots that wait when every version is published; the next offer blocks until one of them is out."""


class _Offer(msgspec.Struct, frozen=True):
    version: Version
    digest: str
    shards: tuple[Shard, ...]


class Publisher:
    """Publishes versions in the order of the offers, one at a time, from a task of `loop` that the constructor starts.

    Order per version: bytes on the transport, then the manifest on `<run>.weights.<policy>`, then old versions are retired. A
    kill between any two of these leaves either no manifest or a good one; offering the version again completes it.

    An error ends the task; it is raised by the next `offer` or by `close`.

    Args:
        transport: where the bytes go; `mirrors` (name to transport) get a copy.
        loop: the loop that runs the bus, in another thread than the one that calls `offer` and `close`.
        keep: newest announced versions whose bytes stay. 0: all of them, and no version is ever skipped.
        report: gets the metrics `weights/publish_s` and `weights/bytes_total` of each version.
        offered: called by `offer` before it draws, with the version and those before it that may still be published: other ranks that
            have a part of each take theirs.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        transport: WeightTransport,
        *,
        policy: str,
        loop: asyncio.AbstractEventLoop,
        keep: int = 4,
        mirrors: Mapping[str, WeightTransport] | None = None,
        report: Callable[[dict[str, float]], Awaitable[None]] | None = None,
        offered: Callable[[Version, Sequence[Version]], None] | None = None,
    ) -> None:
        self._bus = bus
        self._subject = subjects.weights(policy)
        self._policy = policy
        self._transport = transport
        self._mirrors = dict(mirrors or {})
        self._keep = keep
        self._report = report
        self._offered = offered
        self._publishing: Version | None = None
        self._loop = loop
        self._waiting: deque[_Offer] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._drawing = False
        """True while an offer has been taken that is not among those that wait yet."""
        self._wake = asyncio.Event()
        self._announced: dict[Version, Manifest] = {}
        self._counts: dict[Version, int] = {}
        self._done: Future[None] = asyncio.run_coroutine_threadsafe(self._work(), loop)
        self._done.add_done_callback(self._notify)

    def offer(self, version: Version, digest: str, shards: Iterable[Shard]) -> None:
        """Take a snapshot of `version` and return; the only work done here is to draw `shards` (the copy to the host, or on the device).

        With `keep` > 0 it replaces a snapshot that still waits (the latest wins), and lets go of it before it draws: a trainer has
        few buffers. With `keep` = 0 nothing is replaced, and the call waits while `MAX_WAITING` snapshots do.

        Args:
            version: the version the shards are.
            digest: of all tensors, as in the version's ledger entry.
            shards: every slice of every tensor, or this rank's of each.

        Raises:
            WeightSyncError: an earlier version could not be published, its bytes do not have the digest that was offered with it, or the
                publisher is closed.
            BusError: the bus refused an earlier manifest.
        """
        with self._changed:
            if self._keep == 0:
                self._changed.wait_for(lambda: len(self._waiting) < MAX_WAITING or self._closing or self._done.done())
            self.check()
            if self._closing:
                raise WeightSyncError(
                    f"{self._policy} {version}: expected an open publisher, got a closed one", version=str(version), closed=True
                )
            if self._keep and self._waiting:
                logger.info("event=weights_replaced policy=%s version=%s by=%s", self._policy, self._waiting.pop().version, version)
            kept = [*([self._publishing] if self._publishing else []), *(waiting.version for waiting in self._waiting)]
            self._drawing = True
        offer = None
        try:
            if self._offered is not None:
                self._offered(version, kept)
            offer = _Offer(version, digest, tuple(shards))
        finally:
            with self._changed:
                self._drawing = False
                self._waiting.extend([offer] if offer is not None else [])
            self._loop.call_soon_threadsafe(self._wake.set)

    @property
    def publishing(self) -> Version | None:
        """The version that is being published; None: none is."""
        return self._publishing

    def check(self) -> None:
        """Raise what has ended publishing, as `offer` and `close` do: a trainer that waits for samples may not come to either for long."""
        if self._done.done():
            self._done.result()

    def close(self, timeout_s: float | None = None) -> None:
        """Publish what waits, then stop; safe to call twice.

        Raises:
            WeightSyncError: as in `offer`.
            BusError: as in `offer`.
            TimeoutError: not done after `timeout_s` seconds; publishing goes on.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._loop.call_soon_threadsafe(self._wake.set)
        self._done.result(timeout_s)

    async def _work(self) -> None:
        await self._recall()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (offer := self._next()) is not None:
                await self._publish(offer)
            with self._changed:
                if self._closing and not self._waiting and not self._drawing:
                    return

    def _notify(self, _: Future[None]) -> None:
        """Wake a caller that waits for room: with the task ended there will be none."""
        with self._changed:
            self._changed.notify_all()

    def _next(self) -> _Offer | None:
        with self._changed:
            offer = self._waiting.popleft() if self._waiting else None
            self._publishing = offer.version if offer is not None else None
            self._changed.notify_all()
            return offer

    async def _recall(self) -> None:
        """Learn which versions were announced before this process began."""
        last = await self._bus.last(self._subject)
        while last is not None:
            first = (await self._bus.state(WEIGHTS)).first
            messages = self._bus.read(WEIGHTS, after=first - 1, subject=self._subject)
            try:
                async for message in messages:
                    self._remember(message)
                    if message.sequence >= last.sequence:
                        return
            except LogTruncated:
                # The budget dropped the oldest since `first` was asked for; what is known already stays true.
                logger.info("event=weights_manifests_trimmed policy=%s action=read_again", self._policy)
            finally:
                if isinstance(messages, AsyncGenerator):
                    await messages.aclose()

    def _remember(self, message: Message) -> None:
        try:
            manifest = decode(message.body, Manifest, where=f"{message.subject} sequence {message.sequence}")
        except SchemaError as error:
            logger.warning("event=weights_manifest_unreadable policy=%s action=skipped reason=%s", self._policy, error.message)
            return
        self._announced[manifest.version] = manifest
        self._counts[manifest.version] = self._counts.get(manifest.version, 0) + 1

    async def _publish(self, offer: _Offer) -> None:
        if await self._is_out(offer):
            logger.info("event=weights_already_out policy=%s version=%s", self._policy, offer.version)
            return
        started = time.monotonic()
        manifest = await self._transport.publish(offer.version, iter(offer.shards))
        if manifest.digest != offer.digest:
            raise WeightSyncError(
                f"{self._policy} {offer.version}: expected the ledger's digest {offer.digest}, got {manifest.digest} from the shards",
                hint="the parameters changed between the step's digest and the snapshot, or a rank's slices are missing",
                version=str(offer.version),
                expected=offer.digest,
                got=manifest.digest,
            )
        mirrors = {name: await mirror.publish(offer.version, iter(offer.shards)) for name, mirror in self._mirrors.items()}
        manifest = manifests.with_mirrors(manifest, mirrors)
        await self._announce(manifest)
        await self._retire()
        took_s = time.monotonic() - started
        nbytes = manifests.wire_bytes(manifest)
        logger.info("event=weights_published policy=%s version=%s bytes=%d took_s=%.3f", self._policy, offer.version, nbytes, took_s)
        if self._report is not None:
            await self._report({"weights/publish_s": took_s, "weights/bytes_total": float(nbytes)})

    async def _is_out(self, offer: _Offer) -> bool:
        """Whether the version, or (unless all are kept) a newer one, is announced and can still be fetched."""
        known = self._announced.get(offer.version)
        if known is not None:
            manifests.check_same(known, offer.digest)
            if await self._transport.holds(known):
                return True
        newest = max(self._announced, default=None)
        if self._keep == 0 or newest is None or newest <= offer.version:
            return False
        return await self._transport.holds(self._announced[newest])

    async def _announce(self, manifest: Manifest) -> None:
        """Store the manifest under the first id of its version that is free: republished bytes are a new message."""
        body = encode(manifest)
        version = manifest.version
        while True:
            count = self._counts.get(version, 0)
            self._counts[version] = count + 1
            receipt = await self._bus.publish(self._subject, body, id=f"w{self._policy}.{version.epoch}.{version.number}.{count}")
            if not receipt.duplicate or await self._is_stored(receipt, body):
                break
        self._announced[version] = manifest

    async def _is_stored(self, receipt: Receipt, body: bytes) -> bool:
        """Whether a duplicate's first message is this one (its receipt was lost), and not one from before the stream was trimmed."""
        try:
            return bytes((await self._bus.fetch(WEIGHTS, receipt.sequence)).body) == body
        except NotFound:
            return False

    async def _retire(self) -> None:
        versions = sorted(self._announced)
        if self._keep == 0 or len(versions) <= self._keep:
            return
        oldest_kept = versions[-self._keep]
        for transport in (self._transport, *self._mirrors.values()):
            await transport.retire(oldest_kept)
        for version in versions[: -self._keep]:
            del self._announced[version]
