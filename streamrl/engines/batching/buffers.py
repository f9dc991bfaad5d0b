"""Two copies of a policy's weights as flat host bytes: one is served, the other takes the next version."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Manifest
from streamrl.tensors.concatenation import ALIGNMENT, ITEM_BYTES, aligned
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.weights.protocol import Part, Slice


class TensorLayout(msgspec.Struct, frozen=True):
    """One parameter. `glued` parameters follow their predecessor without a gap (they are read as one fused matrix)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    glued: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def offsets(layout: Sequence[TensorLayout]) -> dict[str, int]:
    """First byte of every parameter in a buffer."""
    result: dict[str, int] = {}
    end = 0
    for tensor in layout:
        start = end if tensor.glued else aligned(end)
        result[tensor.name] = start
        end = start + tensor.nbytes
    return result


class WeightBuffers:
    """Both copies, and how a manifest's bytes map into them."""

    def __init__(self, layout: Sequence[TensorLayout]) -> None:
        self._layout = {tensor.name: tensor for tensor in layout}
        self._offsets = offsets(layout)
        size = max((self._offsets[tensor.name] + tensor.nbytes for tensor in layout), default=0)
        self.arrays = tuple(_aligned(size) for _ in range(2))

    def check(self, manifest: Manifest) -> None:
        """Refuse a manifest of another model.

        Raises:
            WeightSyncError: an adapter, or names, shapes or dtypes do not fit.
        """
        where = f"version {manifest.version} of policy {manifest.policy!r}"
        if manifest.kind == "adapter":
            raise WeightSyncError(
                f"expected a whole version, got kind {manifest.kind!r} for {where}", hint="publish full versions", kind=manifest.kind
            )
        names = {spec.name for spec in manifest.tensors}
        if names != self._layout.keys():
            missing, unexpected = sorted(self._layout.keys() - names)[:3], sorted(names - self._layout.keys())[:3]
            raise WeightSyncError(
                f"expected this engine's {len(self._layout)} parameters in {where}, missing {missing}, unexpected {unexpected}",
                hint="trainer and engine must use the same model directory",
                missing=missing,
                unexpected=unexpected,
            )
        for spec in manifest.tensors:
            own = self._layout[spec.name]
            if (spec.dtype, tuple(spec.shape)) != (own.dtype, own.shape):
                raise WeightSyncError(
                    f"expected {own.dtype} {own.shape} for {spec.name}, got {spec.dtype} {tuple(spec.shape)} in {where}",
                    hint="trainer and engine must use the same model directory and dtype",
                    tensor=spec.name,
                    got=(spec.dtype, tuple(spec.shape)),
                )

    def wants(self, manifest: Manifest) -> Sequence[Slice]:
        """The whole concatenation in one slice, after `check`."""
        self.check(manifest)
        start = min(spec.offset for spec in manifest.tensors)
        return (Slice(start, max(spec.offset + spec.nbytes for spec in manifest.tensors) - start),)

    def write(self, index: int, manifest: Manifest, part: Part) -> int:
        """Copy one part into buffer `index`; returns the bytes that fell into tensors."""
        data = np.frombuffer(part.data, np.uint8)
        end = part.start + len(data)
        written = 0
        for spec in manifest.tensors:
            low, high = max(spec.offset, part.start), min(spec.offset + spec.nbytes, end)
            if low >= high:
                continue
            target = self._offsets[spec.name] + low - spec.offset
            self.arrays[index][target : target + high - low] = data[low - part.start : high - part.start]
            written += high - low
        return written

    def digest(self, index: int) -> str:
        """Digest of all parameters in buffer `index`, 16 hex digits."""
        array = self.arrays[index]
        sums: dict[str, int] = {}
        for name, tensor in self._layout.items():
            start = self._offsets[name]
            sums[name] = tensor_digest(array[start : start + tensor.nbytes], ITEM_BYTES[tensor.dtype])
        return combine(sums)


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size]
