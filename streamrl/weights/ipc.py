"""Transport `ipc`: a version stays where the trainer's snapshot put it, in device memory, and engines of the host read it there.

```text
trainer   parameters ─ one device copy ─▶ buffer A or B (a ring) ─ manifest: lease, memory handle
engine                                      └─ takes the lease, opens the handle, copies over NVLink, checks, lets go
```
Publishing moves no bytes: it hands out the snapshot's handle as soon as its copy is under way, and engines follow it bucket by bucket
(`streamrl.tensors.buckets`). Digests are known from the step, or made of the snapshot. The ring holds the newest
`weights.ring` versions; an older one is gone, pinned or not, when the trainer needs its buffer (readers get a few seconds to finish), so
who wants older versions reads a mirror of another transport. A trainer without a GPU publishes on the fallback, and says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from streamrl.errors import WeightSyncError
from streamrl.schemas.subjects import check_name
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Contribution, Link, Manifest, PartRef, TensorSlice
from streamrl.tensors.buckets import MARK_BYTES, Buckets, check_copying
from streamrl.weights import manifest as manifests
from streamrl.weights import ranks
from streamrl.weights.ipc_lease import Lease, Owner, ReadLease, is_held, owner_of
from streamrl.weights.merging import Merger
from streamrl.weights.pins import Pins
from streamrl.weights.protocol import CudaSource, DeviceMemory, FileSource, HostBytes, Part, Shard, Slice, Snapshot
from streamrl.weights.shm import ShmTransport, check_host, host_id

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Bytes of one part that a host reader gets."""


class Opened(Protocol):
    """Device memory of another process, opened here."""

    def read(self, start: int, out: HostBytes) -> None:
        """Write its bytes `start .. start + len(out)` to the host."""
        ...


class Opener(Protocol):
    """Opens handles. Adapter: `streamrl.weights.ipc_memory.CudaOpener`."""

    def usable(self) -> bool:
        """Whether this process can open device memory at all."""
        ...

    def open(self, handle: bytes, owner: str, owners: Collection[str]) -> Opened:
        """The memory of a publisher, open until one is opened of a version with other `owners`; raises WeightSyncError when it is gone."""
        ...


class IpcTransport:
    """Both ends of the transport.

    Args:
        directory: folder of this run alone that trainer and engines of the host share; leases lie in it.
        fallback: publishes what does not lie on a device.
        opener: makes what `fetch` reads through, when it is first needed; None: this process only hands out sources (its weights
            live in other processes).
        pins: whose versions `retire` spares while the ring has room.
    """

    def __init__(
        self,
        *,
        run: str,
        policy: str,
        directory: Path,
        fallback: ShmTransport,
        opener: Callable[[], Opener] | None = None,
        pins: Pins | None = None,
    ) -> None:
        self._run = run
        self._policy = check_name("policy", policy)
        self._directory = directory
        self._fallback = fallback
        self._make_opener = opener
        self._opener: Opener | None = None
        self._pins = pins
        self._owner: Owner | None = None
        self._published: dict[Version, tuple[Manifest, Lease]] = {}
        self._contributed: dict[Version, tuple[Contribution, Lease]] = {}
        self._described: tuple[object, manifests.Described] | None = None
        """Layout and description of the version before."""
        self._sliced: tuple[object, tuple[TensorSlice, ...]] | None = None
        self._merger = Merger()
        self._told = False

    async def publish(self, version: Version, shards: Iterator[Shard]) -> Manifest:
        given = tuple(shards)
        snapshot = self._snapshot(given)
        if snapshot is None:
            return await self._fallback.publish(version, iter(given))
        content = await asyncio.to_thread(self._describe, given, snapshot)
        known = self._published.get(version)
        if known is not None:
            manifests.check_same(known[0], content.digest)
            if await self.holds(known[0]):
                return known[0]
        part, lease = await self._hand_out(version, snapshot)
        built = manifests.build(
            content,
            run=self._run,
            policy=self._policy,
            version=version,
            parts=(part,),
            transport="ipc",
            host=host_id(self._directory),
            published_s=time.time(),
        )
        self._keep(built, lease)
        return built

    async def contribute(self, version: Version, shards: Iterator[Shard], *, moved: Callable[[], None] | None = None) -> Contribution:
        given = tuple(shards)
        snapshot = self._snapshot(given)
        if snapshot is None:
            return await self._fallback.contribute(version, iter(given), moved=moved)
        slices = await asyncio.to_thread(self._slices, given, snapshot)
        known = self._contributed.get(version)
        if known is not None and known[0].slices == slices and not known[1].revoked:
            return known[0]
        made = Contribution(
            run=self._run,
            policy=self._policy,
            version=version,
            slices=slices,
            links=(),
            transport="ipc",
            host=host_id(self._directory),
        )
        if snapshot.nbytes:
            part, lease = await self._hand_out(version, snapshot)
            made = msgspec.structs.replace(made, links=(Link(version=version, parts=(part,)),))
            self._contributed = {version: (made, lease)}
        return made

    def merge(self, contributions: Sequence[Contribution]) -> Manifest:
        if contributions and contributions[0].transport != "ipc":
            return self._fallback.merge(contributions)
        merged = self._merger.merge(contributions)
        self._keep(merged, self._contributed[merged.version][1])
        return merged

    async def fetch(self, manifest: Manifest, wants: Sequence[Slice]) -> AsyncIterator[Part]:
        manifests.check_wants(manifest, wants)
        ranks.check_places(manifest)
        chosen = [(part, pieces) for part in manifest.parts if (pieces := ranks.wanted(manifest.pieces, part, wants))]
        if not chosen:
            return
        with self._leased(manifest) as leases:
            for part, pieces in chosen:
                memory = await asyncio.to_thread(self._open, manifest, part)
                buckets = _buckets(manifest, part, memory)
                for piece in pieces:
                    for cut in manifests.cut(piece.nbytes, PIECE_BYTES):
                        out = np.empty(cut.nbytes, np.uint8)
                        start = piece.stored - part.offset + cut.start
                        if buckets is not None:
                            await asyncio.to_thread(buckets.wait, start + cut.nbytes)
                        await asyncio.to_thread(memory.read, start, out)
                        leases[part.location].check()
                        yield Part(piece.start + cut.start, out.data)

    @asynccontextmanager
    async def source(self, manifest: Manifest) -> AsyncGenerator[FileSource | CudaSource]:
        """The device memory itself; leaving raises WeightSyncError when the trainer took it back meanwhile."""
        ranks.check_places(manifest)
        with self._leased(manifest) as leases:
            yield CudaSource(_memory(manifest), {owner_of(part.location): part.copying for part in manifest.parts if part.copying})
            for lease in leases.values():
                lease.check()

    async def holds(self, manifest: Manifest) -> bool:
        if manifest.transport != "ipc":
            return await self._fallback.holds(manifest)
        if manifest.host != host_id(self._directory) or not manifest.parts:
            return False
        if manifest.version not in self._published and self._make_opener is not None and not await asyncio.to_thread(self._usable):
            return False
        return all(is_held(self._directory, part.location) for part in manifest.parts)

    async def retire(self, older_than: Version) -> None:
        pinned = await self._pins.versions() if self._pins is not None else frozenset[Version]()
        for version in [version for version in self._published if version < older_than and version not in pinned]:
            # Somebody may be reading it: then it goes when the ring needs the buffer.
            if await asyncio.to_thread(self._published[version][1].revoke, 0):
                del self._published[version]
        await self._fallback.retire(older_than)

    def close(self) -> None:
        """Say that the memory is going."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def _snapshot(self, shards: Sequence[Shard]) -> Snapshot | None:
        """The snapshot that the shards are of; None, and said once, where they lie on the host."""
        snapshot = _snapshot(shards)
        if snapshot is None and not self._told:
            logger.warning("event=weights_ipc_unavailable policy=%s reason=trainer_has_no_gpu action=publish_on_the_fallback", self._policy)
            self._told = True
        return snapshot

    def _describe(self, shards: Sequence[Shard], snapshot: Snapshot) -> manifests.Described:
        before = self._described
        if before is not None and before[0] is snapshot.layout and len(shards) == len(before[1].tensors):
            made = before[1].renewed(snapshot.digests())
        else:
            content = manifests.Content(shards)
            _check_layout({spec.name: spec.offset for spec in content.tensors}, content.nbytes, shards, snapshot)
            made = manifests.Described(content.tensors, content.nbytes, content.digest)
        self._described = snapshot.layout, made
        return made

    def _slices(self, shards: Sequence[Shard], snapshot: Snapshot) -> tuple[TensorSlice, ...]:
        before = self._sliced
        if before is not None and before[0] is snapshot.layout:
            made = ranks.renewed(before[1], snapshot.digests())
        else:
            content = ranks.RankContent(shards)
            starts = dict(zip((one.name for one in content.slices), content.starts, strict=True))
            _check_layout(starts, content.nbytes, shards, snapshot)
            made = content.slices
        self._sliced = snapshot.layout, made
        return made

    async def _hand_out(self, version: Version, snapshot: Snapshot) -> tuple[PartRef, Lease]:
        handle = await asyncio.to_thread(snapshot.handle)
        if self._owner is None:
            self._owner = Owner(self._directory, self._policy)
        lease = self._owner.publish(version)
        snapshot.guard(lease)
        return PartRef(location=lease.path.name, offset=0, nbytes=snapshot.nbytes, handle=handle, copying=snapshot.copying), lease

    def _keep(self, manifest: Manifest, lease: Lease) -> None:
        self._published = {number: entry for number, entry in self._published.items() if not entry[1].revoked}
        self._published[manifest.version] = manifest, lease

    @contextmanager
    def _leased(self, manifest: Manifest) -> Generator[dict[str, ReadLease]]:
        """The leases of all parts, by location."""
        check_host(manifest, self._directory, what="device memory")
        leases: dict[str, ReadLease] = {}
        try:
            for part in manifest.parts:
                if part.location in leases:
                    raise WeightSyncError(
                        f"{manifest.policy} {manifest.version}: expected each lease once, got {part.location!r} twice",
                        location=part.location,
                    )
                if part.copying:
                    check_copying(part.copying, part.nbytes, where=f"{manifest.policy} {manifest.version}")
                leases[part.location] = ReadLease(self._directory, part.location, where=f"{manifest.policy} {manifest.version}")
            yield leases
        finally:
            for lease in leases.values():
                lease.release()

    def _usable(self) -> bool:
        if self._opener is None and self._make_opener is not None:
            self._opener = self._make_opener()
        return self._opener is not None and self._opener.usable()

    def _open(self, manifest: Manifest, part: PartRef) -> Opened:
        if not self._usable() or self._opener is None:
            raise WeightSyncError(
                f"{manifest.policy} {manifest.version}: expected a CUDA device to read its memory with, got none in this process",
                hint="set weights.also_on_bus = true for engines without a GPU",
                version=str(manifest.version),
                device="cuda",
            )
        return self._opener.open(part.handle, owner_of(part.location), {owner_of(one.location) for one in manifest.parts})


def _snapshot(shards: Sequence[Shard]) -> Snapshot | None:
    """The snapshot that all shards are of; None if they lie on the host."""
    found = {None if isinstance(shard.data, np.ndarray) else shard.data.snapshot for shard in shards}
    if len(found) > 1:
        raise WeightSyncError(f"expected all tensors in one snapshot, got {len(found)} or some on the host")
    return next(iter(found), None)


def _buckets(manifest: Manifest, part: PartRef, memory: Opened) -> Buckets | None:
    """What is complete of a part; None: all of it."""
    if not (copying := part.copying):
        return None

    def look() -> list[int]:
        marks = np.empty(MARK_BYTES * len(copying.ends), np.uint8)
        memory.read(copying.at, marks)
        return marks.view("<i8").tolist()

    return Buckets(copying, look, where=f"{manifest.policy} {manifest.version}")


def _memory(manifest: Manifest) -> tuple[DeviceMemory, ...]:
    """Where the version lies, in the order of its concatenation."""
    found = [
        DeviceMemory(part.handle, piece.stored - part.offset, piece.nbytes, owner_of(part.location), piece.start)
        for part in manifest.parts
        for piece in ranks.placed(manifest.pieces, part.offset, part.nbytes)
    ]
    return tuple(sorted(found, key=lambda memory: memory.start or 0))


def _check_layout(starts: Mapping[str, int], nbytes: int, shards: Sequence[Shard], snapshot: Snapshot) -> None:
    """Raise WeightSyncError unless the snapshot's memory is what is published."""
    for shard in shards:
        start = starts.get(shard.name)
        if start is not None and not isinstance(shard.data, np.ndarray) and shard.data.start != start:
            raise WeightSyncError(f"tensor {shard.name!r}: expected at byte {start} of the snapshot, got {shard.data.start}")
    if snapshot.nbytes != nbytes:
        raise WeightSyncError(f"expected a snapshot of {nbytes} bytes, got {snapshot.nbytes}")
