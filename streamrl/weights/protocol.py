"""The weight seams: how a version's bytes leave the trainer, and how an engine takes them without stopping."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Contribution, Copying, Manifest

HostBytes = npt.NDArray[np.uint8]
"""[nbytes] uint8."""


class Guard(Protocol):
    """What stands between the readers of published device memory and its owner, who wants to write to it again."""

    def revoke(self, patience_s: float) -> bool:
        """Take the memory back: no new readers from now on, and at most `patience_s` seconds for those that are reading.

        Returns:
            False when a reader had not finished; it learns of it before it uses the bytes.
        """
        ...


class SnapshotDigests(Protocol):
    """Digests by name of what a snapshot has of each tensor: of the elements, and of the words of 8 bytes of what is made of words."""

    @property
    def elements(self) -> Mapping[str, int]: ...

    @property
    def words(self) -> Mapping[str, int]: ...


class Snapshot(Protocol):
    """A version's bytes on the trainer's device, laid out as `streamrl.tensors.concatenation` says, with zeros in the gaps.

    Nothing writes to them while this object is referenced, nor before its guard, if it has one, is revoked.
    """

    nbytes: int
    copying: Copying
    """How readers know which of the bytes are complete."""

    @property
    def layout(self) -> object:
        """The same object for all snapshots that have the same tensors at the same places: what depends on nothing else is made once."""
        ...

    def digests(self) -> SnapshotDigests:
        """Of all its tensors; waits for the copy unless they were known before it."""
        ...

    def handle(self) -> bytes:
        """What other processes of this host open the memory with (streamrl.tensors.cuda_ipc), once its first bucket is complete."""
        ...

    def guard(self, guard: Guard) -> None:
        """Let the memory be rewritten, when nothing else refers to the snapshot, only after `guard` is revoked."""
        ...


COMPARED_ELEMENTS = 16 << 20
"""Elements that a device compares at once (`DeviceBytes.changes`)."""
COMPARED_BYTES = 6 * COMPARED_ELEMENTS
"""Room that it has for that. Each element has a flag of 1 byte; each that has changed, a fourth of them at most, a position of 8 and one
of 4 bytes, and its old and new bits of up to 4 each: 1 + (8 + 4 + 4 + 4) / 4."""


class Changed(NamedTuple):
    """The elements that differ between two versions of a tensor, as unsigned integers of their bits."""

    positions: npt.NDArray[np.int64]
    """Ascending, counted from the first element that was looked at."""
    old: npt.NDArray[np.unsignedinteger]
    new: npt.NDArray[np.unsignedinteger]


class DeviceBytes(Protocol):
    """One tensor's bytes in a snapshot. The methods wait for the snapshot's copy, not for the training thread; any thread may call them."""

    start: int
    """First byte in the snapshot."""
    nbytes: int

    @property
    def snapshot(self) -> Snapshot:
        """What it is a part of."""
        ...

    def copy_to(self, first: int, out: HostBytes) -> None:
        """Write bytes `first .. first + len(out)` of this tensor to the host's `out` ([n] uint8)."""
        ...

    def changes(self, before: DeviceBytes, itemsize: int, first: int, count: int) -> Changed | None:
        """What of elements `first .. first + count` is not as in `before`, compared on the device.

        None where `before` does not lie there, or so much has changed that the host may as well have all of it.

        Args:
            before: the same tensor of another version.
            itemsize: bytes of an element.
            first: counted from the first that is held.
            count: at most `COMPARED_ELEMENTS`, so that no more than `COMPARED_BYTES` of the device are taken; one call of a snapshot
                ring is served at a time.
        """
        ...

    def digest(self, itemsize: int, global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> int:
        """As `streamrl.tensors.digest.slice_digest`, computed on the device.

        It is asked for by elements, and by words of 8 bytes with shapes and offset counted in them (`streamrl.tensors.digest.as_words`).
        """
        ...


class Shard(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rank's slice of one parameter: a snapshot, on the host or on a device, that the trainer never writes to again."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...] = ()
    """Index of the slice's first element in each dimension; empty means it begins at 0 everywhere."""
    data: HostBytes | DeviceBytes
    """The slice's elements in C order."""
    shape: tuple[int, ...]

    def host(self) -> HostBytes:
        """The bytes on the host; a copy where they lie on a device."""
        if isinstance(self.data, np.ndarray):
            return self.data
        copy = np.empty(self.data.nbytes, np.uint8)
        self.data.copy_to(0, copy)
        return copy


class Slice(msgspec.Struct, frozen=True):
    """Bytes `start .. start + nbytes` of a version's concatenation that a host wants."""

    start: int
    nbytes: int


class Part(msgspec.Struct, frozen=True):
    """Bytes of a version, at `start` of its concatenation."""

    start: int
    data: memoryview


class Commit(msgspec.Struct, frozen=True):
    """What a commit did. `committed` is False when a version as new or newer was being served already."""

    version: Version
    committed: bool
    took_ms: float


class WeightHost(Protocol):
    """Stands beside an engine's weights, on every tensor-parallel rank."""

    def wants(self, manifest: Manifest) -> Sequence[Slice]:
        """The byte ranges this rank needs. Raises WeightSyncError when names, shapes or dtypes do not fit its model."""
        ...

    async def stage(self, manifest: Manifest, parts: AsyncIterator[Part]) -> str:
        """Write the bytes into the idle buffer and return its digest (16 hex); never touches the serving buffer.

        Raises WeightSyncError when the digest is not the manifest's; the serving weights are as before.
        """
        ...

    async def commit(self, version: Version) -> Commit:
        """Serve the staged version from the next forward pass on; a compare-and-set that never goes back to an older one."""
        ...


class FilePiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where some bytes of a version lie. A row of four numbers: there are many of them."""

    file: int
    """Index of the file."""
    offset: int
    """First byte in the file."""
    start: int
    """First byte in the version's concatenation."""
    nbytes: int


class FileSource(msgspec.Struct, frozen=True, tag="file"):
    """A file of this host that holds the version's concatenation, or files of which each has pieces of it."""

    path: str
    more: tuple[str, ...] = ()
    """The files behind the first."""
    pieces: tuple[FilePiece, ...] = ()
    """In order of the concatenation, apart from each other; empty: the file is the concatenation."""


class DeviceMemory(msgspec.Struct, frozen=True):
    """Bytes `offset .. offset + nbytes` of a buffer on a device of this host; `streamrl.tensors.cuda_ipc.open_shared(handle)` opens it."""

    handle: bytes
    offset: int
    nbytes: int
    owner: str = ""
    """Process that the buffer belongs to. Buffers of another that are still open keep the memory of a dead one from being freed."""
    start: int | None = None
    """First byte in the version's concatenation; None: right after the memory before."""


class CudaSource(msgspec.Struct, frozen=True, tag="cuda"):
    """Device memory that holds the version's concatenation, in order; only what lies between tensors may be left out."""

    memory: tuple[DeviceMemory, ...]
    copying: dict[str, Copying] = {}
    """By owner: how much of its memory is complete; all of it where nothing is said."""


@runtime_checkable
class SourceHost(WeightHost, Protocol):
    """A host whose weights live in other processes, which read a version where it lies instead of being handed its bytes."""

    async def stage_from(self, manifest: Manifest, source: FileSource | CudaSource) -> str:
        """As `stage`; returns once nobody reads the source any more."""
        ...


class WeightTransport(Protocol):
    """Moves versions; both ends are rank-local. Adapters: `ipc` (devices of one host), `shm` (one host), `bus` (wherever the bus reaches).

    A transport that needs both ends at once (`nccl` between the GPUs of two hosts) fits in: `publish` starts sending from a snapshot
    and returns a manifest without parts, whose `host` and `transport` tell engines where to ask; `fetch` joins, and raises within
    a bound when the other end is gone, so that the reader takes the same version by a mirror; `holds` says whether the sender
    still offers it. Bytes that arrive on the device take the way of `source`, with a source of their own kind.
    """

    async def publish(self, version: Version, shards: Iterator[Shard]) -> Manifest:
        """Put the bytes where engines can fetch them; idempotent per version. The caller announces the manifest."""
        ...

    def fetch(self, manifest: Manifest, wants: Sequence[Slice]) -> AsyncIterator[Part]:
        """The wanted bytes; raises WeightSyncError when the version is gone or its publisher dies."""
        ...

    async def holds(self, manifest: Manifest) -> bool:
        """Whether this transport reaches all the bytes of the manifest now: the right host, and nothing of it gone."""
        ...

    def source(self, manifest: Manifest) -> AbstractAsyncContextManager[FileSource | CudaSource]:
        """The version where readers in other processes of this host find it whole, as it is until the context is left.

        Entering raises WeightSyncError as `fetch` does; so does leaving, when the bytes had to be given up while they were read.
        What is read there is to be checked against the manifest's digests.
        """
        ...

    async def retire(self, older_than: Version) -> None:
        """Free the bytes of older versions, but for pinned ones and for what a newer or pinned one is made from."""
        ...


class RankTransport(Protocol):
    """The publishing end on each of several trainer ranks: every rank stores its slices, rank 0 merges and announces."""

    async def contribute(self, version: Version, shards: Iterator[Shard], *, moved: Callable[[], None] | None = None) -> Contribution:
        """Store this rank's slices; idempotent per version. `moved` is called whenever bytes have gone, where that may take long.

        Raises WeightSyncError for a slice that is not a range of rows of dimension 0.
        """
        ...

    def merge(self, contributions: Sequence[Contribution]) -> Manifest:
        """On rank 0: the manifest of a version that all ranks have contributed to."""
        ...
