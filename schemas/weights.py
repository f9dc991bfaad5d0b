"""Weight manifests: what a version consists of and where its bytes are."""

from __future__ import annotations

from typing import Literal

import msgspec

from streamrl.schemas.versions import Version


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a version. `offset` is its first byte in the concatenation of the manifest's parts."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """`float32`, `bfloat16`, `float16`, ..."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str
    """streamrl.core.digest of its elements, 16 hex digits."""


class PartRef(msgspec.Struct, frozen=True):
    """One piece of a version's bytes: `location` is a blob name (bus) or a shared-memory name (shm)."""

    location: str
    offset: int
    nbytes: int
    sha256: str = ""


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
    """`shm` or `bus`; one manifest may be offered on several (see `mirrors`)."""
    mirrors: dict[str, tuple[PartRef, ...]] = {}
    """The same bytes on other transports."""
    host: str = ""
    """Host id (for transports that reach one host only)."""
    digest: str
    """Digest over all tensors, 16 hex digits; equals the ledger entry's."""
    nbytes: int
    published_s: float = 0.0
    """Unix seconds; for people and lag metrics only."""
