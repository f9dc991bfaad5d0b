"""Transport `shm`: one file per version in a folder of one host, normally below /dev/shm; readers map it.

A name is never used twice and a file is never written again once it has its final name, so a mapping shows the same bytes for as
long as it lives, even after the file has been retired. (A buffer that the trainer rewrites must not be shared: an engine that made
views of it would serve half-trained weights.)
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import shutil
import stat
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from streamrl.errors import WeightSyncError
from streamrl.schemas.subjects import check_name
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Contribution, Link, Manifest, PartRef
from streamrl.system import reserve
from streamrl.weights import manifest as manifests
from streamrl.weights import ranks
from streamrl.weights.blobs import sha256_of
from streamrl.weights.changes import Source
from streamrl.weights.merging import Merger
from streamrl.weights.pins import Pins
from streamrl.weights.protocol import FilePiece, FileSource, Part, Shard, Slice

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"^(?P<policy>[A-Za-z0-9_-]+)\.(?P<epoch>\d+)-(?P<number>\d+)\.[0-9a-f]+(?:\.r(?P<rank>\d+))?\.(?P<state>weights|partial)$"
)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GONE_HINT = "a version is removed when newer ones are out: take a newer one"


class ShmTransport:
    """Both ends of the transport.

    Args:
        directory: folder of this run alone; made when first written to.
        pins: whose versions `retire` spares; None: nobody's.
        part_bytes: bytes covered by one checksum.
        rank: of the trainer's ranks that publish slices from this host; each writes files of its own.
    """

    def __init__(
        self, *, run: str, policy: str, directory: Path, pins: Pins | None = None, part_bytes: int = 8 << 20, rank: int = 0
    ) -> None:
        self._run = run
        self._policy = check_name("policy", policy)
        self._directory = directory
        self._pins = pins
        self._part_bytes = part_bytes
        self._published: dict[Version, Manifest] = {}
        self._rank = rank
        self._suffix = f".r{rank}" if rank else ""
        self._contributed: dict[Version, Contribution] = {}
        self._merger = Merger()
        self._lock_file: int | None = None

    async def publish(self, version: Version, shards: Iterator[Shard]) -> Manifest:
        known = self._published.get(version)
        content = await asyncio.to_thread(manifests.Content, shards)
        if known is not None:
            manifests.check_same(known, content.digest)
            if await self.holds(known):
                return known
        parts = await asyncio.to_thread(self._write, version, content)
        built = manifests.build(
            content,
            run=self._run,
            policy=self._policy,
            version=version,
            parts=parts,
            transport="shm",
            host=host_id(self._directory),
            published_s=time.time(),
        )
        self._published[version] = built
        return built

    async def contribute(self, version: Version, shards: Iterator[Shard], *, moved: Callable[[], None] | None = None) -> Contribution:
        content = await asyncio.to_thread(ranks.RankContent, shards)
        known = self._contributed.get(version)
        if known is None or not self._has(known):
            parts = await asyncio.to_thread(self._write, version, content) if content.nbytes else ()
            known = Contribution(
                run=self._run,
                policy=self._policy,
                version=version,
                slices=content.slices,
                links=(Link(version=version, parts=parts),) if parts else (),
                transport="shm",
                host=host_id(self._directory),
            )
            self._contributed = {version: known}
        elif known.slices != content.slices:
            raise WeightSyncError(f"{self._policy} {version}: expected the slices contributed before, got others")
        return known

    def merge(self, contributions: Sequence[Contribution]) -> Manifest:
        merged = self._merger.merge(contributions)
        self._published[merged.version] = merged
        return merged

    async def fetch(self, manifest: Manifest, wants: Sequence[Slice]) -> AsyncIterator[Part]:
        """As the protocol says; the parts are views of mappings, valid for as long as they are referenced."""
        manifests.check_wants(manifest, wants)
        files = _files(manifest)
        chosen = [(part, pieces) for part in manifest.parts if (pieces := ranks.wanted(manifest.pieces, part, wants))]
        if not chosen:
            return
        begin = {name: min(part.offset for part in manifest.parts if part.location == name) for name in files}
        mapped = {name: memoryview(self._map(manifest, name, nbytes)) for name, nbytes in files.items()}
        for part, pieces in chosen:
            data = mapped[part.location][part.offset - begin[part.location] :][: part.nbytes]
            if part.sha256 and await asyncio.to_thread(sha256_of, data) != part.sha256:
                raise WeightSyncError(
                    f"{manifest.policy} {manifest.version}: expected sha256 {part.sha256[:12]}... for {part.nbytes} bytes at {part.offset} "
                    f"of {self._directory / part.location}, got other bytes",
                    hint="something else has written to the file; a newer version or a restart of the trainer brings good bytes",
                    sha256=part.sha256,
                )
            for piece in pieces:
                first = piece.stored - part.offset
                yield Part(piece.start, data[first : first + piece.nbytes])

    @contextlib.asynccontextmanager
    async def source(self, manifest: Manifest) -> AsyncGenerator[FileSource]:
        """The version's own file, or those of the ranks that stored it: who reads them takes of each what he needs."""
        files = _files(manifest)
        if not await self.holds(manifest):
            raise WeightSyncError(
                f"{manifest.policy} {manifest.version}: its file is not there", hint=_GONE_HINT, version=str(manifest.version)
            )
        first, *more = (str(self._directory / name) for name in files)
        yield FileSource(first, tuple(more), _pieces(manifest, list(files)))

    async def holds(self, manifest: Manifest) -> bool:
        if manifest.host != host_id(self._directory) or not manifest.parts:
            return False
        try:
            return all((self._directory / name).stat().st_size >= nbytes for name, nbytes in _files(manifest).items())
        except FileNotFoundError:
            return False

    async def retire(self, older_than: Version) -> None:
        pinned = await self._pins.versions() if self._pins is not None else frozenset[Version]()
        for version in [version for version in self._published if version < older_than and version not in pinned]:
            del self._published[version]
        await asyncio.to_thread(self._unlink, older_than, pinned)

    def close(self) -> None:
        """Let another publisher of this policy take over; the files stay."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _has(self, made: Contribution) -> bool:
        return all((self._directory / part.location).exists() for link in made.links for part in link.parts)

    def _unlink(self, older_than: Version, pinned: frozenset[Version]) -> None:
        for path, version, _ in self._files():
            if version < older_than and version not in pinned:
                path.unlink(missing_ok=True)
                logger.debug("event=weights_retired policy=%s version=%s file=%s", self._policy, version, path.name)

    def _write(self, version: Version, content: Source) -> tuple[PartRef, ...]:
        """Write all bytes under a temporary name, then give the file its own; a publisher that dies before leaves nothing to fetch."""
        name = f"{self._policy}.{version.epoch}-{version.number}.{secrets.token_hex(6)}{self._suffix}"
        partial, final = self._directory / f"{name}.partial", self._directory / f"{name}.weights"
        try:
            self._take_over()
            parts = self._write_partial(partial, final.name, content)
            partial.rename(final)
        except OSError as error:
            raise WeightSyncError(
                f"cannot write {content.nbytes} bytes of {self._policy} {version} to {self._directory}: {error.strerror or error}",
                hint="free memory there or mount a larger /dev/shm, lower weights.keep, or set weights.transport = 'bus'",
                path=str(self._directory),
                size_bytes=content.nbytes,
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        return parts

    def _write_partial(self, path: Path, location: str, content: Source) -> tuple[PartRef, ...]:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Reserving all pages first turns a full file system into ENOSPC here; a write to a mapping would be a SIGBUS.
            reserve(descriptor, content.nbytes)
            target = np.frombuffer(mmap.mmap(descriptor, content.nbytes), dtype=np.uint8)
        finally:
            os.close(descriptor)
        parts: list[PartRef] = []
        for piece in manifests.cut(content.nbytes, self._part_bytes):
            view = target[piece.start : piece.start + piece.nbytes]
            content.fill(piece.start, view)
            parts.append(PartRef(location=location, offset=piece.start, nbytes=piece.nbytes, sha256=sha256_of(view.data)))
        return tuple(parts)

    def _take_over(self) -> None:
        """Once, before the first write: remove what a dead publisher left unfinished; its finished files stay until they are retired.

        The lock on the lock file is held for as long as this process lives, so whoever gets it knows that the one before is dead.
        """
        if self._lock_file is not None:
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(self._directory)
        self._lock_file = os.open(self._directory / f"{self._policy}{self._suffix}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("event=weights_publisher_alive policy=%s directory=%s action=left_its_files", self._policy, self._directory)
            return
        for path, version, state in self._files():
            if state == "partial" and _rank_of(path) == self._rank:
                path.unlink(missing_ok=True)
                logger.info("event=weights_leftover_removed policy=%s version=%s file=%s", self._policy, version, path.name)

    def _files(self) -> Iterator[tuple[Path, Version, str]]:
        """Files of this policy with their version and state (`weights` or `partial`)."""
        if not self._directory.is_dir():
            return
        for path in sorted(self._directory.iterdir()):
            match = _NAME.match(path.name)
            if match is not None and match["policy"] == self._policy:
                yield path, Version(int(match["epoch"]), int(match["number"])), match["state"]

    def _map(self, manifest: Manifest, name: str, nbytes: int) -> mmap.mmap:
        where = f"{manifest.policy} {manifest.version}"
        check_host(manifest, self._directory, what="shared memory")
        path = self._directory / name
        check_own(self._directory)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise WeightSyncError(
                f"{where}: {path} cannot be read: {error.strerror}", hint=_GONE_HINT, version=str(manifest.version)
            ) from error
        try:
            size = os.fstat(descriptor).st_size
            if size < nbytes:
                raise WeightSyncError(f"{where}: expected {nbytes} bytes in {path}, got {size}", hint=_GONE_HINT, expected=nbytes, got=size)
            return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)


def check_own(directory: Path) -> None:
    """Anybody may make names in /dev/shm: what is ours is a folder, not a link to one, and nobody else may write there.

    Raises:
        WeightSyncError: the folder is a link, another user's, or open to others.
    """
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return  # whoever opens a file there says so
    wrong = (
        "is a link"
        if stat.S_ISLNK(found.st_mode)
        else "is no folder"
        if not stat.S_ISDIR(found.st_mode)
        else f"belongs to user {found.st_uid}"
        if found.st_uid != os.getuid()
        else f"is open to others (mode {stat.S_IMODE(found.st_mode):o})"
        if found.st_mode & 0o022
        else ""
    )
    if wrong:
        raise WeightSyncError(
            f"expected a folder of ours for weights at {directory}, but it {wrong}",
            hint="remove it, or have it removed: whoever made it could give engines other weights; or set weights.transport = 'bus'",
            path=str(directory),
        )


def host_id(directory: Path) -> str:
    """What two processes have in common if a file of one is a file of the other: the running kernel and the file system.

    Two containers of one machine with a /dev/shm each get different ids.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    try:
        kernel = _BOOT_ID.read_text().strip()
    except OSError:
        kernel = f"{uuid.getnode():012x}"
    return f"{kernel}-{existing.stat().st_dev:x}"


def check_host(manifest: Manifest, directory: Path, *, what: str) -> None:
    """Raise WeightSyncError unless the version is in `what` of this host."""
    here = host_id(directory)
    if manifest.host != here:
        raise WeightSyncError(
            f"{manifest.policy} {manifest.version}: expected a manifest of this host ({here}), got one of {manifest.host or 'no host'}",
            hint=f"{what} reaches one host only: set weights.transport = 'bus', or weights.also_on_bus = true",
            host=manifest.host,
            expected=here,
        )


def remove_directory(directory: Path) -> None:
    """Free all versions of a run that has ended; engines that still map one keep it."""
    if directory.is_dir():
        check_own(directory)
        shutil.rmtree(directory)


def _files(manifest: Manifest) -> dict[str, int]:
    """Names of the manifest's files with the bytes of each; refuses what is not a plain name of ours: no manifest can point elsewhere."""
    nbytes: dict[str, int] = {}
    for part in manifest.parts:
        match = _NAME.match(part.location)
        if match is None or match["state"] != "weights":
            raise WeightSyncError(
                f"{manifest.policy} {manifest.version}: expected the name of one weights file, got {part.location!r}",
                location=part.location,
            )
        nbytes[part.location] = nbytes.get(part.location, 0) + part.nbytes
    ranks.check_places(manifest)
    if not manifest.pieces and len(nbytes) != 1:
        raise WeightSyncError(f"{manifest.policy} {manifest.version}: expected one weights file, got {sorted(nbytes)}")
    return nbytes


def _pieces(manifest: Manifest, files: Sequence[str]) -> tuple[FilePiece, ...]:
    """Where the bytes of each piece lie; none where the one file is the version."""
    if not manifest.pieces:
        return ()
    begin = {name: min(part.offset for part in manifest.parts if part.location == name) for name in files}
    index = {name: number for number, name in enumerate(files)}
    found: list[FilePiece] = []
    for part in manifest.parts:
        for piece in ranks.placed(manifest.pieces, part.offset, part.nbytes):
            file, offset = index[part.location], piece.stored - begin[part.location]
            last = found[-1] if found else None
            if last and (last.file, last.offset + last.nbytes, last.start + last.nbytes) == (file, offset, piece.start):
                found[-1] = FilePiece(file, last.offset, last.start, last.nbytes + piece.nbytes)
            else:
                found.append(FilePiece(file, offset, piece.start, piece.nbytes))
    return tuple(sorted(found, key=lambda piece: piece.start))


def _rank_of(path: Path) -> int:
    match = _NAME.match(path.name)
    return int(match["rank"] or 0) if match else -1
