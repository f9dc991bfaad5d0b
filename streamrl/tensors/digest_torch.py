"""The digest of `streamrl.tensors.digest`, of torch tensors where they lie: no byte of them goes to the host.

On a GPU one Triton kernel reads all regions in one launch; elsewhere, and where Triton cannot be used, plain torch operations
do the same in blocks. A region is a rectangular slice of a tensor whose elements may lie in memory with any strides (a rank's rows or
columns of a fused matrix, say); partial sums of disjoint regions that cover a tensor add up mod 2^64 to its digest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from streamrl.errors import SchemaError
from streamrl.tensors.digest import GAMMA, MASK, WORD_BYTES, as_words

if TYPE_CHECKING:
    from streamrl.tensors.digest_triton import Launch

logger = logging.getLogger(__name__)

BLOCK = 1 << 20
"""Elements that the torch operations take at a time: some 8 MiB for each intermediate."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Region(msgspec.Struct, frozen=True):
    """A slice of a whole tensor.

    `tensor`: its elements, any strides, any dtype of 1, 2, 4 or 8 bytes. `global_shape`: shape of the whole tensor. `offset`: index of the
    slice's first element in each dimension; empty: 0 everywhere.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...] = ()


class Axis(msgspec.Struct, frozen=True):
    """Dimensions of a region that can be walked as one: `size` steps, how far each moves in memory and in the whole tensor (elements)."""

    size: int
    stride: int
    step: int


class Walk(msgspec.Struct, frozen=True):
    """A region as integers to visit: `bits` views its elements, the first of them has the index `first` in the whole tensor."""

    bits: Tensor
    first: int
    axes: tuple[Axis, ...]


class Digester:
    """Digests tensors that stay where they are, again and again: what the kernel needs is laid out on the device once.

    Args:
        tensors: whole ones, or regions of some, on one device; neither their memory nor their strides may change.
    """

    def __init__(self, tensors: Sequence[Tensor | Region]) -> None:
        self._walks = [walk(_region(tensor)) for tensor in tensors]
        self._some = [index for index, one in enumerate(self._walks) if one.bits.numel()]
        self._prepared: list[tuple[list[int], Launch]] | None = None

    def digests(self) -> list[int]:
        """As `region_digests` of the tensors as they are now, on the current stream."""
        found = [0] * len(self._walks)
        if not self._some:
            return found
        device = self._walks[self._some[0]].bits.device
        for index, value in zip(self._some, self._sums(device), strict=True):
            found[index] = value
        return found

    def _sums(self, device: torch.device) -> list[int]:
        walks = [self._walks[index] for index in self._some]
        if device.type != "cuda" or not kernel_works(device):
            return torch_sums(walks)
        from streamrl.tensors.digest_triton import launches, run_launches

        with torch.cuda.device(device):
            self._prepared = self._prepared or launches(walks)
            return run_launches(self._prepared, len(walks))


class NamedDigests(msgspec.Struct, frozen=True):
    """Digests by name, partial ones of regions: of elements, and of the words of 8 bytes of what is made of words."""

    elements: Mapping[str, int]
    words: Mapping[str, int]


class NamedDigester:
    """As `Digester`, of named tensors and by words as well; words need a tensor whose elements lie in memory in C order."""

    def __init__(self, tensors: Mapping[str, Tensor | Region]) -> None:
        self._names = list(tensors)
        self._elements = Digester(list(tensors.values()))
        words = {name: words for name, tensor in tensors.items() if (words := _as_words(_region(tensor))) is not None}
        self._word_names = list(words)
        self._words = Digester(list(words.values()))

    def digests(self) -> NamedDigests:
        """Of the tensors as they are now, on the current stream."""
        elements = dict(zip(self._names, self._elements.digests(), strict=True))
        return NamedDigests(elements, dict(zip(self._word_names, self._words.digests(), strict=True)))


def as_word_tensor(tensor: Tensor) -> Tensor | None:
    """The same memory as words: [nbytes / 8] int64; None where there is no such view."""
    if not tensor.is_contiguous() or tensor.nbytes % WORD_BYTES or tensor.data_ptr() % WORD_BYTES:
        return None
    return tensor.detach().view(-1).view(torch.int64)


def _region(tensor: Tensor | Region) -> Region:
    return tensor if isinstance(tensor, Region) else Region(tensor, tuple(tensor.shape))


def _as_words(region: Region) -> Region | None:
    place = as_words(region.tensor.element_size(), region.global_shape, region.offset, region.tensor.shape)
    view = as_word_tensor(region.tensor)
    # Rows of whole words lie in memory as the words do.
    return Region(view, place[0], place[1]) if view is not None and place is not None and len(place[0]) == 1 else None


def tensor_digests(tensors: Sequence[Tensor]) -> list[int]:
    """Digests of whole tensors, 0 <= value < 2^64; as `region_digests`."""
    return region_digests([Region(tensor, tuple(tensor.shape)) for tensor in tensors])


def region_digests(regions: Sequence[Region]) -> list[int]:
    """Partial digests of regions, 0 <= value < 2^64; 0 for an empty one.

    Regions of one device are read on its current stream; the call returns when that is done.

    Raises:
        SchemaError: elements of another size than 1, 2, 4 or 8 bytes, or a region that does not lie in its tensor.
    """
    walks = [walk(region) for region in regions]
    places: dict[torch.device, list[int]] = {}
    for index, one in enumerate(walks):
        if one.bits.numel():
            places.setdefault(one.bits.device, []).append(index)
    found = [0] * len(walks)
    for device, indices in places.items():
        for index, value in zip(indices, _sums(device, [walks[i] for i in indices]), strict=True):
            found[index] = value
    return found


def walk(region: Region) -> Walk:
    """The region's axes; raises SchemaError as `region_digests` does."""
    tensor, shape = region.tensor.detach(), tuple(region.global_shape)
    offset = tuple(region.offset) or (0,) * len(shape)
    item = tensor.element_size()
    if item not in _BITS:
        raise SchemaError(f"expected elements of 1, 2, 4 or 8 bytes, got {item}", itemsize=item)
    fits = len(shape) == tensor.ndim == len(offset)
    if not fits or any(o < 0 or o + n > g for o, n, g in zip(offset, tensor.shape, shape, strict=True)):
        raise SchemaError(
            f"expected a slice within shape {shape}, got offset {offset} and shape {tuple(tensor.shape)}",
            shape=tuple(shape),
            offset=tuple(offset),
        )
    axes: list[Axis] = []
    first = 0
    for dim, size in enumerate(tensor.shape):
        step = math.prod(shape[dim + 1 :])
        first += offset[dim] * step
        axis = Axis(size, tensor.stride(dim), step)
        if size == 1:
            continue
        if axes and (axes[-1].stride, axes[-1].step) == (size * axis.stride, size * axis.step):
            axis = Axis(axes.pop().size * size, axis.stride, axis.step)
        axes.append(axis)
    return Walk(tensor.view(_BITS[item]), first, tuple(axes))


def torch_sums(walks: Sequence[Walk]) -> list[int]:
    """Partial digests by torch operations, on any device; no walk is empty."""
    return [int(torch.stack(_pieces(one)).sum()) & MASK for one in walks]


def _sums(device: torch.device, walks: Sequence[Walk]) -> list[int]:
    if device.type == "cuda" and kernel_works(device):
        from streamrl.tensors.digest_triton import triton_sums

        return triton_sums(walks)
    return torch_sums(walks)


@cache
def kernel_works(device: torch.device) -> bool:
    """Whether Triton is here, compiles the kernel and gives what the torch operations give; tried once."""
    try:
        from streamrl.tensors.digest_triton import FAILURES, triton_sums
    except ImportError as error:
        logger.warning("event=digest_kernel_missing device=%s action=torch_operations reason=%s", device, error)
        return False
    sample = torch.arange(5000, device=device, dtype=torch.int32).view(100, 50)
    regions = [
        Region(sample, (100, 50)),
        Region(sample[:, 7:20], (100, 50), (0, 7)),
        Region(sample.view(torch.bfloat16), (100, 100)),
        Region(sample.view(torch.int64), (100, 25)),
    ]
    walks = [walk(region) for region in regions]
    try:
        works = triton_sums(walks) == torch_sums(walks)
    except FAILURES as error:
        logger.warning("event=digest_kernel_failed device=%s action=torch_operations reason=%s", device, error)
        return False
    if not works:
        logger.error("event=digest_kernel_wrong device=%s action=torch_operations", device)
    return works


def _pieces(one: Walk) -> list[Tensor]:
    """Sums of blocks of at most about `BLOCK` elements, int64 scalars."""
    todo = [one]
    found: list[Tensor] = []
    while todo:
        bits, first, axes = (part := todo.pop()).bits, part.first, part.axes
        inner = math.prod(axis.size for axis in axes[1:])
        if not axes or inner * axes[0].size <= BLOCK:
            found.append(_mixed(bits, first, axes))
            continue
        head, rest = axes[0], axes[1:]
        rows = max(1, BLOCK // inner)
        start = bits.storage_offset()
        for row in range(0, head.size, rows):
            count = min(rows, head.size - row)
            kept = rest if count == 1 else (Axis(count, head.stride, head.step), *rest)
            view = bits.as_strided((1,), (1,), start + row * head.stride)
            todo.append(Walk(view, first + row * head.step, kept))
    return found


def _mixed(bits: Tensor, first: int, axes: Sequence[Axis]) -> Tensor:
    elements = bits.as_strided([axis.size for axis in axes], [axis.stride for axis in axes], bits.storage_offset()).to(torch.int64)
    if bits.element_size() < 8:
        elements = elements & ((1 << 8 * bits.element_size()) - 1)
    index = torch.full((), first + 1, dtype=torch.int64, device=bits.device)
    for axis in axes:
        index = index[..., None] + torch.arange(axis.size, device=bits.device) * axis.step
    z = elements + index * _signed(GAMMA)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)).sum()


def _shifted(z: Tensor, by: int) -> Tensor:
    """Logical shift to the right: torch's is arithmetic."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
