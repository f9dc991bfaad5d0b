"""Manifests as pure functions: how shards become one byte string, how it is cut into parts, what of it a reader wants.

A version is the concatenation of its tensors in order of name (`streamrl.tensors.concatenation.place_of`), each beginning at a multiple of
64 bytes (the gaps are zero). It is cut into parts of equal size, each with its own SHA-256, and a part may begin and end in the middle of
a tensor.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import SchemaError, WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Link, Manifest, PartRef, TensorSpec
from streamrl.tensors.concatenation import ITEM_BYTES, aligned, place_of
from streamrl.tensors.digest import MASK, WORD_BYTES, as_words, combine, combine_texts, digest_text, digest_texts, slice_digest
from streamrl.weights.protocol import DeviceBytes, HostBytes, Shard, Slice, SnapshotDigests


class Described(msgspec.Struct, frozen=True):
    """What a manifest says of a version's bytes."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int
    digest: str
    """Over all tensors, 16 hex digits."""

    def renewed(self, digests: SnapshotDigests) -> Described:
        """Of other bytes at the same places: only their digests differ. A mixture of experts has tens of thousands of tensors."""
        elements, words = digest_texts(digests.elements), digest_texts(digests.words)
        tensors = tuple(
            TensorSpec(
                spec.name,
                spec.dtype,
                spec.shape,
                spec.offset,
                spec.nbytes,
                elements[spec.name],
                words[spec.name] if spec.words else "",
            )
            for spec in self.tensors
        )
        return Described(tensors, self.nbytes, combine_texts(elements))


class Content:
    """The bytes of one version, read from its shards without joining them in memory first.

    Example: two tensors of 6 and 2 bytes; the second begins at the next multiple of 64.

        >>> def shard(name: str, n: int) -> Shard:
        ...     return Shard(name=name, dtype="uint8", global_shape=(n,), shape=(n,), data=np.full(n, n, np.uint8))
        >>> content = Content([shard("b.weight", 2), shard("a.weight", 6)])
        >>> [(spec.name, spec.offset) for spec in content.tensors], content.nbytes
        ([('a.weight', 0), ('b.weight', 64)], 66)

    Args:
        shards: every element of every tensor exactly once; a tensor may come as several slices (one per rank).

    Raises:
        WeightSyncError: no shards, an unknown dtype, or slices that do not cover their tensor exactly once.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        by_name: dict[str, list[Shard]] = {}
        for shard in shards:
            by_name.setdefault(shard.name, []).append(shard)
        if not by_name:
            raise WeightSyncError("expected at least one tensor to publish, got none", tensors=0)
        self._shards = by_name
        specs: list[TensorSpec] = []
        end = 0
        for name in sorted(by_name, key=place_of):
            spec = _spec(by_name[name], aligned(end))
            specs.append(spec)
            end = spec.offset + spec.nbytes
        self.tensors = tuple(specs)
        if end == 0:
            raise WeightSyncError(f"expected at least one element to publish, got {len(specs)} empty tensors", tensors=len(specs))
        self.nbytes = end
        self.digest = combine({spec.name: int(spec.digest, 16) for spec in specs})
        """Over all tensors, 16 hex digits."""

    def fill(self, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Write bytes `start .. start + len(out)` of the concatenation into `out` ([n] uint8)."""
        done, end = start, start + len(out)
        # A version of a mixture of experts has tens of thousands of tensors, and is filled in thousands of blocks.
        low = max(0, bisect.bisect_right(self.tensors, start, key=_offset) - 1)
        for spec in self.tensors[low : bisect.bisect_left(self.tensors, end, key=_offset)]:
            first, last = max(start, spec.offset), min(end, spec.offset + spec.nbytes)
            if first < last:
                out[done - start : first - start] = 0
                self._copy(spec, first - spec.offset, out[first - start : last - start])
                done = last
        out[done - start :] = 0

    def devices(self) -> Mapping[int, DeviceBytes] | None:
        """What lies at each first byte; None unless every tensor lies whole on a device."""
        found: dict[int, DeviceBytes] = {}
        for spec in self.tensors:
            data = self._shards[spec.name][0].data
            if len(self._shards[spec.name]) > 1 or isinstance(data, np.ndarray):
                return None
            found[spec.offset] = data
        return found

    def _copy(self, spec: TensorSpec, first: int, out: HostBytes) -> None:
        shards = self._shards[spec.name]
        data = shards[0].data if len(shards) == 1 else self._joined(spec)
        copy_bytes(data, first, out)

    def _joined(self, spec: TensorSpec) -> HostBytes:
        shards = self._shards[spec.name]
        item = ITEM_BYTES[spec.dtype]
        whole = np.empty(spec.shape, dtype=f"V{item}")
        for shard in shards:
            begin = shard.offset or (0,) * len(shard.shape)
            index = tuple(slice(b, b + n) for b, n in zip(begin, shard.shape, strict=True))
            whole[index] = shard.host().view(f"V{item}").reshape(shard.shape)
        # Kept, so that a tensor that lies in several parts is joined once.
        data = whole.reshape(-1).view(np.uint8)
        self._shards[spec.name] = [msgspec.structs.replace(shards[0], data=data, shape=spec.shape, offset=())]
        return data


def copy_bytes(data: HostBytes | DeviceBytes, first: int, out: HostBytes) -> None:
    """Write bytes `first .. first + len(out)` of a shard to the host's `out`."""
    if isinstance(data, np.ndarray):
        out[:] = data[first : first + len(out)]
    else:
        data.copy_to(first, out)


def build(
    content: Content | Described,
    *,
    run: str,
    policy: str,
    version: Version,
    parts: Sequence[PartRef],
    transport: str,
    host: str = "",
    published_s: float = 0.0,
) -> Manifest:
    """Manifest of a full version whose bytes lie in `parts`."""
    return Manifest(
        run=run,
        policy=policy,
        version=version,
        tensors=content.tensors,
        parts=tuple(parts),
        transport=transport,
        host=host,
        digest=content.digest,
        nbytes=content.nbytes,
        published_s=published_s,
    )


def cut(nbytes: int, limit: int) -> tuple[Slice, ...]:
    """Consecutive slices of at most `limit` bytes that cover `nbytes` bytes."""
    if limit < 1:
        raise WeightSyncError(f"a part needs a limit of at least 1 byte, got {limit}", limit_bytes=limit)
    return tuple(Slice(start, min(limit, nbytes - start)) for start in range(0, nbytes, limit))


def cover(manifest: Manifest, wants: Sequence[Slice]) -> Iterator[tuple[PartRef, tuple[Slice, ...]]]:
    """The parts that hold `wants`, in order, each with the wanted byte ranges that lie in it.

    Raises:
        WeightSyncError: the parts do not cover the version without gaps, or a wanted range lies outside of it.
    """
    end = check_consecutive(manifest)
    if end != manifest.nbytes:
        raise WeightSyncError(
            f"manifest of {manifest.policy} {manifest.version}: expected parts of {manifest.nbytes} bytes in all, got {end}",
            expected=manifest.nbytes,
            got=end,
        )
    check_wants(manifest, wants)
    for part in manifest.parts:
        inside = tuple(piece for want in wants if (piece := _overlap(want, part)) is not None)
        if inside:
            yield part, inside


def check_consecutive(manifest: Manifest) -> int:
    """Bytes of all parts; raises WeightSyncError unless each begins where the one before it ends."""
    end = 0
    for part in manifest.parts:
        if part.offset != end or part.nbytes < 1:
            raise WeightSyncError(
                f"manifest of {manifest.policy} {manifest.version}: expected a part at byte {end}, got one of {part.nbytes} bytes at "
                f"{part.offset}",
                expected=end,
                got=part.offset,
            )
        end += part.nbytes
    return end


def check_wants(manifest: Manifest, wants: Sequence[Slice]) -> None:
    """Raise WeightSyncError for a wanted range that does not lie in the version."""
    for want in wants:
        if want.start < 0 or want.nbytes < 0 or want.start + want.nbytes > manifest.nbytes:
            raise WeightSyncError(
                f"expected a range within the {manifest.nbytes} bytes of {manifest.policy} {manifest.version}, got {want.nbytes} bytes "
                f"at {want.start}",
                start=want.start,
                nbytes=want.nbytes,
            )


def with_mirrors(manifest: Manifest, mirrors: Mapping[str, Manifest]) -> Manifest:
    """The manifest with the same version on other transports, as each of them would announce it."""
    links = {name: links for mirror in mirrors.values() for name, links in mirror.links.items()}
    return msgspec.structs.replace(
        manifest, mirrors={name: mirror.parts for name, mirror in mirrors.items()}, links={**manifest.links, **links}
    )


def offers(manifest: Manifest) -> tuple[Manifest, ...]:
    """The manifest as each transport that has its bytes would have written it, the main one first."""
    mirrored = [_offer(manifest, name, parts) for name, parts in sorted(manifest.mirrors.items())]
    links = {name: links for name, links in manifest.links.items() if name == manifest.transport}
    return (msgspec.structs.replace(manifest, mirrors={}, links=links), *mirrored)


def kind_of(link: Link) -> Literal["full", "delta"]:
    """Kind of a manifest whose parts are this link's."""
    return "full" if link.parent is None else "delta"


def wire_bytes(manifest: Manifest) -> int:
    """Bytes that were stored for the version, on all transports."""
    own = [link.parts for links in manifest.links.values() for link in links if link.version == manifest.version]
    linked = {part.location for parts in own for part in parts}
    plain = (manifest.parts, *manifest.mirrors.values())
    return sum(part.nbytes for parts in own for part in parts) + sum(
        part.nbytes for parts in plain for part in parts if part.location not in linked
    )


def _offset(spec: TensorSpec) -> int:
    return spec.offset


def _offer(manifest: Manifest, name: str, parts: tuple[PartRef, ...]) -> Manifest:
    links = manifest.links.get(name, ())
    # The first link of a version is the one whose parts the manifest names.
    own = next((link for link in links if link.version == manifest.version), Link(version=manifest.version, parts=parts))
    return msgspec.structs.replace(
        manifest,
        transport=name,
        parts=parts,
        pieces=own.pieces,
        kind=kind_of(own),
        parent=own.parent,
        mirrors={},
        links={name: links} if links else {},
    )


def check_same(known: Manifest, digest: str) -> None:
    """Raise WeightSyncError unless a version that is out already has this digest: a version never means two sets of weights."""
    if known.digest != digest:
        raise WeightSyncError(
            f"{known.policy} {known.version}: expected the published digest {known.digest}, got {digest}",
            hint="a trainer that cannot re-derive a published version must begin a new epoch",
            version=str(known.version),
            published=known.digest,
        )


def _overlap(want: Slice, part: PartRef) -> Slice | None:
    first, last = max(want.start, part.offset), min(want.start + want.nbytes, part.offset + part.nbytes)
    return Slice(first, last - first) if first < last else None


def _spec(shards: Sequence[Shard], offset: int) -> TensorSpec:
    first = shards[0]
    item = ITEM_BYTES.get(first.dtype)
    if item is None:
        raise WeightSyncError(
            f"tensor {first.name!r}: expected a dtype out of {', '.join(ITEM_BYTES)}, got {first.dtype!r}",
            tensor=first.name,
            dtype=first.dtype,
        )
    total, words = 0, list[int | None]()
    for shard in shards:
        if (shard.dtype, shard.global_shape) != (first.dtype, first.global_shape):
            raise WeightSyncError(
                f"tensor {first.name!r}: expected slices of {first.dtype} {first.global_shape}, got {shard.dtype} {shard.global_shape}",
                tensor=first.name,
                dtype=shard.dtype,
            )
        if shard.data.nbytes != math.prod(shard.shape) * item:
            raise WeightSyncError(
                f"tensor {first.name!r}: expected {math.prod(shard.shape) * item} bytes for {shard.shape}, got {shard.data.nbytes}",
                tensor=first.name,
                nbytes=shard.data.nbytes,
            )
        digest, of_words = shard_digests(shard, item)
        total += digest
        words.append(of_words)
    _check_tiling(shards)
    nbytes = math.prod(first.global_shape) * item
    return TensorSpec(
        name=first.name,
        dtype=first.dtype,
        shape=first.global_shape,
        offset=offset,
        nbytes=nbytes,
        digest=digest_text(total & MASK),
        words=sum_text(words),
    )


def shard_digests(shard: Shard, item: int) -> tuple[int, int | None]:
    """Partial digests of a shard's elements and of its words of 8 bytes; None where it cuts words.

    Raises:
        WeightSyncError: the slice does not lie in its tensor.
    """
    digest = partial(slice_digest, shard.data) if isinstance(shard.data, np.ndarray) else shard.data.digest
    try:
        elements = digest(item, shard.global_shape, shard.offset, shard.shape)
    except SchemaError as error:
        raise WeightSyncError(f"tensor {shard.name!r}: {error.message}", **error.values, tensor=shard.name) from error
    if item == WORD_BYTES or not shard.data.nbytes:
        return elements, elements
    words = as_words(item, shard.global_shape, shard.offset, shard.shape)
    return elements, None if words is None else digest(WORD_BYTES, *words)


def sum_text(parts: Sequence[int | None]) -> str:
    """16 hex digits of the slices' sum; empty when one of them has none."""
    known = [part for part in parts if part is not None]
    return digest_text(sum(known) & MASK) if len(known) == len(parts) else ""


def _check_tiling(shards: Sequence[Shard]) -> None:
    first = shards[0]
    boxes = [tuple((b, b + n) for b, n in zip(s.offset or (0,) * len(s.shape), s.shape, strict=True)) for s in shards if math.prod(s.shape)]
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            if all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True)):
                raise WeightSyncError(
                    f"tensor {first.name!r}: expected disjoint slices, got {one} and {other} (begin, end in each dimension)",
                    tensor=first.name,
                    overlapping=(one, other),
                )
    elements, whole = sum(math.prod(shard.shape) for shard in shards), math.prod(first.global_shape)
    if elements != whole:
        raise WeightSyncError(
            f"tensor {first.name!r}: expected slices that cover {first.global_shape}, got {elements} of {whole} elements",
            hint="gather the slices of all ranks before publishing",
            tensor=first.name,
            elements=elements,
        )
