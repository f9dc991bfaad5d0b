"""Several trainer ranks publish one version: each stores its slices, and what they stored is merged to one manifest.

A slice is a range of rows (dimension 0), which is a range of the tensor's elements in C order; so slices need no copying, and partial
digests add up. What a rank stores is its slices one after the other, in order of name, each at a multiple of `ALIGNMENT`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Contribution, Link, Manifest, PartRef, Piece, TensorSlice, TensorSpec
from streamrl.tensors.concatenation import aligned, place_of
from streamrl.tensors.digest import MASK, combine, digest_text, digest_texts
from streamrl.weights.manifest import ITEM_BYTES, check_consecutive, copy_bytes, cover, shard_digests, sum_text
from streamrl.weights.protocol import DeviceBytes, Shard, Slice, SnapshotDigests

_GATHER_HINT = "gather the parameter on one rank (full_tensor() of a DTensor) and publish it there, or shard it by rows"


class RankContent:
    """The bytes that one rank stores; see `streamrl.weights.manifest.Content` for what one process publishes alone.

    Args:
        shards: this rank's slices, at most one of a tensor; ranges of rows, which may be empty.

    Raises:
        WeightSyncError: a slice of columns, two slices of a tensor, an unknown dtype, or bytes that do not fit the shape.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        by_name: dict[str, tuple[Shard, TensorSlice]] = {}
        for shard in shards:
            one = _slice(shard)
            if shard.name in by_name:
                raise WeightSyncError(f"tensor {shard.name!r}: expected one slice of a rank, got two", hint=_GATHER_HINT, tensor=shard.name)
            by_name[shard.name] = (shard, one)
        ordered = [by_name[name] for name in sorted(by_name, key=place_of)]
        starts = stored_starts([one for _, one in ordered])
        self.nbytes = starts[-1] + _nbytes(ordered[-1][1]) if ordered else 0
        # Of a tensor that has elements a rank without any of them says nothing.
        said = [(shard, one, start) for (shard, one), start in zip(ordered, starts, strict=True) if one.count or not math.prod(one.shape)]
        self.slices = tuple(one for _, one, _ in said)
        self.starts = tuple(start for _, _, start in said)
        """First byte of each slice in what is stored."""
        self._shards = [shard for shard, _, _ in said]

    def fill(self, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Write bytes `start .. start + len(out)` of what is stored into `out` ([n] uint8)."""
        end = start + len(out)
        out[:] = 0
        for index in range(max(0, bisect.bisect_right(self.starts, start) - 1), bisect.bisect_left(self.starts, end)):
            first, data = self.starts[index], self._shards[index].data
            low, high = max(start, first), min(end, first + data.nbytes)
            if low < high:
                copy_bytes(data, low - first, out[low - start : high - start])

    def devices(self) -> Mapping[int, DeviceBytes] | None:
        """What lies at each first byte; None unless all of it lies on a device."""
        found: dict[int, DeviceBytes] = {}
        for start, shard in zip(self.starts, self._shards, strict=True):
            if isinstance(shard.data, np.ndarray):
                return None
            found[start] = shard.data
        return found


def renewed(slices: Sequence[TensorSlice], digests: SnapshotDigests) -> tuple[TensorSlice, ...]:
    """Slices of other bytes at the same places: only their digests differ."""
    elements, words = digest_texts(digests.elements), digest_texts(digests.words)
    return tuple(
        TensorSlice(
            one.name,
            one.dtype,
            one.shape,
            one.first,
            one.count,
            elements[one.name],
            words[one.name] if one.words else "",
        )
        for one in slices
    )


def merge(contributions: Sequence[Contribution], *, published_s: float = 0.0) -> Manifest:
    """The manifest of a version that every rank has contributed to; `links` has the ways to this version alone.

    Args:
        contributions: of all ranks, in any order that is the same on every call.
        published_s: for people.

    Raises:
        WeightSyncError: they are of different versions, transports or hosts, the slices do not cover each tensor exactly once, or some
            ranks stored their slices whole and others only changes.
    """
    first = _check_alike(contributions)
    tensors = _tensors(contributions)
    offsets = {spec.name: spec.offset for spec in tensors}
    links = tuple(link for link in (_whole(contributions, offsets), _changes(contributions)) if link is not None)
    if not links:
        raise WeightSyncError(
            f"{first.policy} {first.version}: expected the whole slices of every rank, or every rank's changes since one version, got "
            + "; ".join(
                f"rank {index} " + (", ".join(_said(link) for link in one.links) or "nothing") for index, one in enumerate(contributions)
            ),
            hint="all ranks must publish the same versions with the same weights.anchor_every; restart them together",
        )
    own = links[0]
    return Manifest(
        run=first.run,
        policy=first.policy,
        version=first.version,
        kind="full" if own.parent is None else "delta",
        parent=own.parent,
        tensors=tensors,
        parts=own.parts,
        pieces=own.pieces,
        transport=first.transport,
        links={first.transport: links},
        host=first.host,
        digest=combine({spec.name: int(spec.digest, 16) for spec in tensors}),
        nbytes=tensors[-1].offset + tensors[-1].nbytes,
        published_s=published_s,
    )


def check_places(manifest: Manifest) -> None:
    """Raise WeightSyncError unless the parts hold every byte of every tensor at exactly one place."""
    where = f"manifest of {manifest.policy} {manifest.version}"
    if not manifest.pieces:
        list(cover(manifest, ()))
        return
    end = check_consecutive(manifest)
    stored = 0
    for piece in manifest.pieces:
        if piece.nbytes < 1 or piece.stored < stored or piece.stored + piece.nbytes > end:
            raise WeightSyncError(
                f"{where}: expected pieces in order within its {end} stored bytes, got {piece.nbytes} at {piece.stored} behind {stored}",
                stored=piece.stored,
            )
        stored = piece.stored + piece.nbytes
    specs = sorted((spec for spec in manifest.tensors if spec.nbytes), key=lambda spec: spec.offset)
    ends = [spec.offset + spec.nbytes for spec in specs]
    reached = 0
    for piece in [*sorted(manifest.pieces, key=lambda piece: piece.start), Piece(0, manifest.nbytes, 0)]:
        if piece.start < reached or piece.start + piece.nbytes > manifest.nbytes:
            raise WeightSyncError(
                f"{where}: expected pieces apart from each other within its {manifest.nbytes} bytes, got {piece.nbytes} at {piece.start} "
                f"behind {reached}",
                start=piece.start,
            )
        # The first tensor with a byte at or behind what is reached: none of its bytes may come before the piece.
        index = bisect.bisect_right(ends, reached)
        if index < len(specs) and max(specs[index].offset, reached) < piece.start:
            spec = specs[index]
            raise WeightSyncError(
                f"{where}: expected a piece with byte {max(spec.offset, reached)}, of tensor {spec.name!r}, got none", tensor=spec.name
            )
        reached = piece.start + piece.nbytes


def placed(pieces: Sequence[Piece], start: int, nbytes: int) -> Iterator[Piece]:
    """Where the stored bytes `start .. start + nbytes` belong; all of them at their own place when there are no pieces."""
    if not pieces:
        yield Piece(start, start, nbytes)
        return
    begin = bisect.bisect_right(pieces, start, key=lambda piece: piece.stored + piece.nbytes)
    for piece in itertools.takewhile(lambda piece: piece.stored < start + nbytes, itertools.islice(pieces, begin, None)):
        low, high = max(start, piece.stored), min(start + nbytes, piece.stored + piece.nbytes)
        if low < high:
            yield Piece(low, piece.start + low - piece.stored, high - low)


def wanted(pieces: Sequence[Piece], part: PartRef, wants: Sequence[Slice]) -> list[Piece]:
    """What of `wants` lies in a part: where it is stored, and where it belongs."""
    return [
        Piece(piece.stored + low - piece.start, low, high - low)
        for piece in placed(pieces, part.offset, part.nbytes)
        for want in wants
        if (low := max(piece.start, want.start)) < (high := min(piece.start + piece.nbytes, want.start + want.nbytes))
    ]


def stored_starts(slices: Sequence[TensorSlice]) -> tuple[int, ...]:
    """First byte of each slice in what its rank stores."""
    starts: list[int] = []
    end = 0
    for one in slices:
        starts.append(aligned(end))
        end = starts[-1] + _nbytes(one)
    return tuple(starts)


def _slice(shard: Shard) -> TensorSlice:
    item = ITEM_BYTES.get(shard.dtype)
    if item is None:
        raise WeightSyncError(f"tensor {shard.name!r}: expected a dtype out of {', '.join(ITEM_BYTES)}, got {shard.dtype!r}")
    begin = shard.offset or (0,) * len(shard.global_shape)
    if shard.shape[1:] != shard.global_shape[1:] or any(begin[1:]):
        raise WeightSyncError(
            f"tensor {shard.name!r}: expected a range of rows of {shard.global_shape}, got {shard.shape} at {begin}",
            hint=_GATHER_HINT,
            tensor=shard.name,
        )
    if shard.data.nbytes != math.prod(shard.shape) * item:
        raise WeightSyncError(f"tensor {shard.name!r}: expected bytes for {shard.shape} of {shard.dtype}, got {shard.data.nbytes}")
    digest, words = shard_digests(shard, item)
    row = math.prod(shard.global_shape[1:])
    return TensorSlice(
        name=shard.name,
        dtype=shard.dtype,
        shape=shard.global_shape,
        first=begin[0] * row if begin else 0,
        count=math.prod(shard.shape),
        digest=digest_text(digest),
        words=sum_text([words]),
    )


def _nbytes(one: TensorSlice) -> int:
    return one.count * ITEM_BYTES[one.dtype]


def _check_alike(contributions: Sequence[Contribution]) -> Contribution:
    if not contributions:
        raise WeightSyncError("expected the contribution of at least one rank, got none")
    first = contributions[0]
    said = (first.run, first.policy, first.version, first.transport, first.host)
    for index, one in enumerate(contributions):
        got = (one.run, one.policy, one.version, one.transport, one.host)
        if got != said:
            raise WeightSyncError(
                f"expected contributions of one run, policy, version, transport and host: {said} of rank 0, got {got} of rank {index}",
                hint="a transport that reaches one host only needs all ranks on it; use weights.transport = 'bus' otherwise",
            )
    return first


def _tensors(contributions: Sequence[Contribution]) -> tuple[TensorSpec, ...]:
    by_name: dict[str, list[TensorSlice]] = {}
    for one in contributions:
        for piece in one.slices:
            by_name.setdefault(piece.name, []).append(piece)
    specs: list[TensorSpec] = []
    end = 0
    for name in sorted(by_name, key=place_of):
        slices = sorted(by_name[name], key=lambda piece: piece.first)
        like = slices[0]
        reached = total = 0
        words = [_sum(name, piece.words) if piece.words else None for piece in slices]
        for piece in (piece for piece in slices if piece.count or not math.prod(piece.shape)):
            if (piece.dtype, piece.shape) != (like.dtype, like.shape):
                raise WeightSyncError(
                    f"tensor {name!r}: expected slices of {like.dtype} {like.shape}, got {piece.dtype} {piece.shape}", tensor=name
                )
            if piece.first != reached:
                raise WeightSyncError(
                    f"tensor {name!r}: expected a slice from element {reached} on, got one from {piece.first} on",
                    hint="every rank contributes its own rows; replicated parameters are contributed by one rank only",
                    tensor=name,
                )
            reached += piece.count
            total += _sum(name, piece.digest)
        if reached != math.prod(like.shape):
            raise WeightSyncError(
                f"tensor {name!r}: expected slices of all {math.prod(like.shape)} elements, got {reached}",
                hint="the contribution of a rank is missing",
                tensor=name,
            )
        nbytes = reached * ITEM_BYTES[like.dtype]
        specs.append(TensorSpec(name, like.dtype, like.shape, aligned(end), nbytes, digest_text(total & MASK), sum_text(words)))
        end = specs[-1].offset + nbytes
    if not end:
        raise WeightSyncError("expected at least one element to publish, got none of any rank")
    return tuple(specs)


def _sum(name: str, digest: str) -> int:
    try:
        return int(digest, 16)
    except ValueError as error:
        raise WeightSyncError(f"tensor {name!r}: expected the digest of a slice as hex digits, got {digest!r}", tensor=name) from error


def _whole(contributions: Sequence[Contribution], offsets: dict[str, int]) -> Link | None:
    """All ranks' slices as one anchor; None if a rank has stored none."""
    parts: list[PartRef] = []
    pieces: list[Piece] = []
    stored = 0
    for one in contributions:
        link = next((link for link in one.links if link.parent is None), None)
        if link is None and _stores(one):
            return None
        parts.extend(_moved(link.parts if link else (), stored))
        before = False  # whether the slice before is the end of its tensor, so that only padding follows
        for start, piece in zip(stored_starts(one.slices), one.slices, strict=True):
            if not piece.count:
                continue
            item = ITEM_BYTES[piece.dtype]
            place = Piece(stored + start, offsets[piece.name] + piece.first * item, piece.count * item)
            if before and not piece.first and place.start - pieces[-1].start == place.stored - pieces[-1].stored:
                # They go on alike, as whole experts do: pieces are few then, and large.
                place = Piece(pieces[-1].stored, pieces[-1].start, place.stored + place.nbytes - pieces[-1].stored)
                pieces.pop()
            pieces.append(place)
            before = piece.first + piece.count == math.prod(piece.shape)
        stored += link.nbytes if link else 0
    whole = len(contributions) == 1 and all(piece.stored == piece.start for piece in pieces)
    return Link(version=contributions[0].version, parts=tuple(parts), pieces=() if whole else tuple(pieces))


def _changes(contributions: Sequence[Contribution]) -> Link | None:
    """All ranks' changes since one version; None unless every rank has stored them."""
    parts: list[PartRef] = []
    parents: set[Version] = set()
    for one in contributions:
        if not _stores(one):
            continue
        link = next((link for link in one.links if link.parent is not None), None)
        if link is None or link.parent is None:
            return None
        parents.add(link.parent)
        parts.extend(_moved(link.parts, sum(part.nbytes for part in parts)))
    if len(parents) != 1:
        return None
    return Link(version=contributions[0].version, parent=parents.pop(), parts=tuple(parts))


def _stores(one: Contribution) -> bool:
    return any(piece.count for piece in one.slices)


def _moved(parts: Sequence[PartRef], by: int) -> list[PartRef]:
    return [msgspec.structs.replace(part, offset=part.offset + by) for part in parts]


def _said(link: Link) -> str:
    return "a whole version" if link.parent is None else f"changes since {link.parent}"
