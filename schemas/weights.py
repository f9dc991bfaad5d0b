"""Weight manifests: what a version consists of and where its bytes are."""

from __future__ import annotations

from typing import Literal

import msgspec

from streamrl.schemas.versions import Version


class TensorSpec(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One tensor of a version. `offset` is its first byte in the concatenation of the manifest's parts."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """`float32`, `bfloat16`, `float16`, ..."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str
    """streamrl.tensors.digest of its elements, 16 hex digits."""
    words: str = ""
    """The same of its words of 8 bytes (`streamrl.tensors.digest.as_words`); empty where it is none or a trainer rank's slice cuts one."""


class Copying(msgspec.Struct, frozen=True, array_like=True):
    """Device memory that its owner may still be copying to, bucket by bucket: readers begin with the first while the others follow."""

    stamp: int
    """What a bucket's mark holds once the bucket is complete; a greater one means that the memory holds a newer version."""
    at: int
    """First byte of the marks in the buffer; each has 8 (int64)."""
    ends: tuple[int, ...]
    """End of each bucket in the buffer."""


class PartRef(msgspec.Struct, frozen=True):
    """One piece of a version's bytes: `location` is a blob name (bus), a shared-memory name (shm) or a lease's name (ipc)."""

    location: str
    offset: int
    nbytes: int
    sha256: str = ""
    handle: bytes = b""
    """Opens the device memory that holds the piece (ipc); see streamrl.tensors.cuda_ipc."""
    copying: Copying | msgspec.UnsetType = msgspec.UNSET
    """The part is there when this says so (ipc); unset: it is complete."""


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes that several ranks stored are in another order than in the version. A row of three numbers: there are many of them."""

    stored: int
    """First byte in the concatenation of the parts."""
    start: int
    """First byte in the version."""
    nbytes: int


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One way to a version: its bytes as a whole, or what changed since its parent."""

    version: Version
    parent: Version | None = None
    """The version that the changes apply to; None: the parts are the whole version (an anchor)."""
    parts: tuple[PartRef, ...]
    """Offsets count from the first part on; with a parent the parts hold changes (`streamrl.weights.delta`)."""
    pieces: tuple[Piece, ...] = ()
    """Where the parts' bytes belong; empty: the parts are the version from its first byte to its last. Anchors only."""

    @property
    def nbytes(self) -> int:
        """Bytes to fetch."""
        return sum(part.nbytes for part in self.parts)


class TensorSlice(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Elements `first .. first + count` of a tensor in C order: what one rank holds of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first: int
    count: int
    digest: str
    """Partial digest, 16 hex digits; those of all slices add up mod 2^64."""
    words: str = ""
    """The same of its words of 8 bytes; empty where the slice cuts one."""


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer rank stored of a version; rank 0 merges all of them to the manifest."""

    run: str
    policy: str
    version: Version
    slices: tuple[TensorSlice, ...]
    links: tuple[Link, ...]
    """The rank's slices as a whole, as changes, or both; without `pieces`: its parts hold the slices in order, each aligned."""
    transport: str
    host: str = ""


class WantedSlices(msgspec.Struct, frozen=True):
    """Rank 0 asks the other ranks of a trainer to store their slices of a version."""

    word: str
    """Of the ranks that are asked: others, started before them, are not."""
    version: Version


class StoredSlices(msgspec.Struct, frozen=True):
    """What a rank has stored on one transport of the version that was asked for; with neither contribution nor error: it is storing."""

    word: str
    version: Version
    contributions: dict[str, Contribution] = {}
    """By transport."""
    error: str = ""
    """Why it has stored nothing."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version: names, shapes, digests, and the parts that hold the bytes."""

    run: str
    policy: str
    version: Version
    kind: Literal["full", "delta", "adapter"] = "full"
    parent: Version | None = None
    """The version a delta applies to."""
    tensors: tuple[TensorSpec, ...]
    parts: tuple[PartRef, ...]
    transport: str
    """`ipc`, `shm` or `bus`; one manifest may be offered on several (see `mirrors`)."""
    mirrors: dict[str, tuple[PartRef, ...]] = {}
    """The same bytes on other transports."""
    links: dict[str, tuple[Link, ...]] = {}
    """By transport: all ways to this version and to those it can be made from, oldest first; empty: `parts` are the whole version."""
    pieces: tuple[Piece, ...] = ()
    """Where the bytes of `parts` belong, if several ranks stored them; see `Link.pieces`."""
    host: str = ""
    """Host id (for transports that reach one host only)."""
    digest: str
    """Digest over all tensors, 16 hex digits; equals the ledger entry's."""
    nbytes: int
    published_s: float = 0.0
    """Unix seconds; for people and lag metrics only."""
