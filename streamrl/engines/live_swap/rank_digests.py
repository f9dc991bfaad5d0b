"""What the ranks of a server digest of a version, put together to the version's digest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamrl.engines.live_swap.messages import Prepared, Region
from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Manifest, TensorSpec
from streamrl.tensors.digest import combine

DIGITS = 16
"""Hex digits of a digest."""


class DigestBooks:
    """Which regions of which tensors the ranks hold. Regions that several ranks hold count once and must be equal on all of them.

    Args:
        tensors: of the version.
        prepared: each rank's answer.

    Raises:
        WeightSyncError: the ranks' regions do not cover a tensor exactly once, or no rank takes it and it is no copy of another.
    """

    def __init__(self, tensors: Sequence[TensorSpec], prepared: Sequence[Prepared]) -> None:
        known: dict[Region, int] = {}
        self._ranks = [np.array([known.setdefault(region, len(known)) for region in one.regions], np.int64) for one in prepared]
        self._regions = list(known)
        self._owner = np.array([region.tensor for region in self._regions], np.int64)
        counts = np.array([region.rows * region.cols for region in self._regions], np.int64)
        # A rank that derives its weights digests whole tensors as they arrive, which leaves nothing to be told by the others' parts.
        whole = counts == np.array([math.prod(tensors[region.tensor].shape) for region in self._regions], np.int64)
        has_whole = np.zeros(len(tensors), np.bool_)
        has_whole[self._owner[whole]] = True
        self._counts = whole | ~has_whole[self._owner]
        """Regions that make up their tensor."""
        covered = np.zeros(len(tensors), np.int64)
        np.add.at(covered, self._owner[self._counts], counts[self._counts])
        self._taken = covered > 0
        self._words = all(one.words for one in prepared)
        for spec, count in zip(tensors, covered.tolist(), strict=True):
            if count not in (0, math.prod(spec.shape)):
                raise WeightSyncError(
                    f"tensor {spec.name!r}: expected {math.prod(spec.shape)} elements on all ranks together, got {count}",
                    tensor=spec.name,
                    elements=count,
                )

    def by_words(self, manifest: Manifest) -> bool:
        """Whether the ranks can be asked for digests of words: a quarter of the work for bfloat16."""
        return self._words and all(spec.words or not spec.nbytes for spec in manifest.tensors)

    def check(self, manifest: Manifest, sums: Sequence[Sequence[int]], *, words: bool = False) -> str:
        """The version's digest, 16 hex digits.

        Args:
            manifest: of the version.
            sums: of each rank, a partial digest for each of its regions.
            words: they are digests of words.

        Raises:
            WeightSyncError: the digest of a tensor is not the manifest's, or ranks differ in what they should share.
        """
        values = np.zeros(len(self._regions), np.uint64)
        seen = np.zeros(len(self._regions), np.bool_)
        for rank, (index, found) in enumerate(zip(self._ranks, sums, strict=True)):
            got = np.array(found, np.uint64)
            if len(got) != len(index):
                raise WeightSyncError(f"rank {rank}: expected {len(index)} partial digests, got {len(got)}")
            wrong = index[seen[index] & (values[index] != got)]
            if len(wrong):
                name = manifest.tensors[int(self._owner[wrong[0]])].name
                raise WeightSyncError(
                    f"{manifest.version}: tensor {name!r} differs between rank {rank} and another rank that shares it",
                    tensor=name,
                    rank=rank,
                )
            values[index], seen[index] = got, True
        totals = np.zeros(len(manifest.tensors), np.uint64)
        np.add.at(totals, self._owner[self._counts], values[self._counts])
        wanted = [spec.words if words and spec.nbytes else spec.digest for spec in manifest.tensors]
        self._compare(manifest, totals, wanted)
        return manifest.digest if words else combine(dict(zip((spec.name for spec in manifest.tensors), totals.tolist(), strict=True)))

    def _compare(self, manifest: Manifest, totals: npt.NDArray[np.uint64], wanted: Sequence[str]) -> None:
        """Raise unless all tensors have the wanted digests; `totals` of those that the model does not take become their twins'."""
        if not self._taken.all():
            taken = {
                (digest, spec.shape): total
                for spec, digest, total, used in zip(manifest.tensors, wanted, totals, self._taken.tolist(), strict=True)
                if used
            }
            for index in np.flatnonzero(~self._taken).tolist():
                spec = manifest.tensors[index]
                # An output head that is tied to the embeddings: the model takes one of the two.
                twin = taken.get((wanted[index], spec.shape))
                if twin is None and math.prod(spec.shape):
                    raise WeightSyncError(
                        f"{manifest.version}: tensor {spec.name!r} is none that the model takes, nor a copy of one",
                        hint="trainer and engine must use the same model directory",
                        tensor=spec.name,
                        known=False,
                    )
                totals[index] = 0 if twin is None else twin
        # All at once, for a mixture of experts has tens of thousands; as texts, for a manifest may hold any.
        text = totals.astype(">u8").tobytes().hex()
        for spec, digest, first in zip(manifest.tensors, wanted, range(0, len(text), DIGITS), strict=True):
            if (got := text[first : first + DIGITS]) != digest:
                raise WeightSyncError(
                    f"{manifest.version}: tensor {spec.name!r}: expected staged bytes with digest {digest}, got {got}",
                    version=str(manifest.version),
                    tensor=spec.name,
                )
