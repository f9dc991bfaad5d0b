"""Ranks' contributions merged version after version: of a mixture of experts only the digests of tens of thousands of slices change."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.schemas.weights import Contribution, Manifest, TensorSlice
from streamrl.tensors.digest import MASK
from streamrl.weights import ranks
from streamrl.weights.manifest import Described

_DIGITS = 16


class _Before(NamedTuple):
    """What was merged last."""

    alike: list[object]
    """What the pieces and places follow from."""
    manifest: Manifest
    tensors: npt.NDArray[np.intp]
    """Which tensor each slice is of."""


class _Sums(NamedTuple):
    elements: Mapping[str, int]
    words: Mapping[str, int]


class Merger:
    """`streamrl.weights.ranks.merge` of versions that lie whole where their ranks stored them: its result, sooner."""

    def __init__(self) -> None:
        self._before: _Before | None = None

    def merge(self, contributions: Sequence[Contribution]) -> Manifest:
        """As `streamrl.weights.ranks.merge`, without links."""
        alike = _alike(contributions)
        before = self._before
        if before is not None and before.alike == alike:
            sums = _sums(before, [piece for one in contributions for piece in one.slices])
            if sums is not None:
                return _renewed(before.manifest, contributions, sums)
        made = msgspec.structs.replace(ranks.merge(contributions, published_s=time.time()), links={})
        index = {spec.name: number for number, spec in enumerate(made.tensors)}
        self._before = _Before(alike, made, np.array([index[piece.name] for one in contributions for piece in one.slices], np.intp))
        return made


def _alike(contributions: Sequence[Contribution]) -> list[object]:
    """Equal for contributions that merge to one manifest but for version, digests, and where the parts are."""
    found: list[object] = []
    for one in contributions:
        found.append((one.run, one.policy, one.version == contributions[0].version, one.transport, one.host))
        found.append([(link.parent, [(part.offset, part.nbytes) for part in link.parts], link.pieces) for link in one.links])
        found.append([(piece.name, piece.dtype, piece.shape, piece.first, piece.count, not piece.words) for piece in one.slices])
    return found


def _sums(before: _Before, slices: Sequence[TensorSlice]) -> _Sums | None:
    """Digests of the tensors; None where a slice's is none."""
    names = [spec.name for spec in before.manifest.tensors]
    found: list[dict[str, int]] = []
    for texts in ([piece.digest for piece in slices], [piece.words or "0" * _DIGITS for piece in slices]):
        if any(len(text) != _DIGITS for text in texts):
            return None
        try:
            values = np.frombuffer(bytes.fromhex("".join(texts)), ">u8").astype(np.uint64)
        except ValueError:
            return None
        sums = np.zeros(len(names), np.uint64)
        np.add.at(sums, before.tensors, values)  # mod 2^64
        found.append(dict(zip(names, (sums & np.uint64(MASK)).tolist(), strict=True)))
    return _Sums(*found)


def _renewed(before: Manifest, contributions: Sequence[Contribution], sums: _Sums) -> Manifest:
    described = Described(before.tensors, before.nbytes, before.digest).renewed(sums)
    parts = [part for one in contributions for link in one.links[:1] for part in link.parts]
    return msgspec.structs.replace(
        before,
        version=contributions[0].version,
        tensors=described.tensors,
        digest=described.digest,
        parts=tuple(msgspec.structs.replace(part, offset=place.offset) for part, place in zip(parts, before.parts, strict=True)),
        published_s=time.time(),
    )
