"""The newest version as one file in memory: changes are applied to it, and the processes of an engine read it from there."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Link, Manifest, TensorSpec
from streamrl.system import memory_file, reserve
from streamrl.tensors.digest import MASK, digest_text, tensor_digest
from streamrl.weights.delta import BLOCK_ELEMENTS, apply_block, read_blocks
from streamrl.weights.manifest import ITEM_BYTES
from streamrl.weights.ranks import placed


class HostImage:
    """The concatenation of one version in a file that only lives in memory; made when first laid out.

    The file has no name in any directory: it is not bounded by the size of /dev/shm, and goes when this process does, however it
    ends. Other processes of the same user open it by `path`. All methods may take long: call them in a thread, one at a time.

    Args:
        name: of the policy.
        pool: threads for applying changes and for digests.
    """

    def __init__(self, name: str, pool: ThreadPoolExecutor) -> None:
        self._name = name
        self._pool = pool
        self._tensors: dict[str, TensorSpec] = {}
        self._digests: dict[str, int] | None = None
        """Of what the image holds, by tensor; None: to be computed."""
        self._descriptor: int | None = None
        self._path = ""
        self._release: Callable[[], object] = _nothing
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.held: Version | None = None
        """The version whose bytes these are; None: of none."""

    @property
    def path(self) -> str:
        """The file, while this process lives; raises WeightSyncError before anything was laid out."""
        if self._descriptor is None:
            raise WeightSyncError(f"expected an image of policy {self._name!r}, none has been laid out")
        return self._path

    def view(self, start: int, nbytes: int) -> memoryview:
        """Bytes of the image, valid until it takes another version."""
        return self._bytes.data[start : start + nbytes].toreadonly()

    def lay_out(self, manifest: Manifest) -> None:
        """Make room for the manifest's tensors; what the image holds stays if they are the same.

        Raises:
            WeightSyncError: the memory does not suffice.
        """
        layout = {spec.name: spec for spec in manifest.tensors}
        same = {name: _place(spec) for name, spec in layout.items()} == {name: _place(spec) for name, spec in self._tensors.items()}
        if same and self._descriptor is not None:
            return
        self.close()
        end = max((spec.offset + spec.nbytes for spec in manifest.tensors), default=0)
        if end > manifest.nbytes or any(spec.nbytes != math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for spec in manifest.tensors):
            raise WeightSyncError(f"manifest of {manifest.policy} {manifest.version}: expected tensors within its {manifest.nbytes} bytes")
        try:
            self._create(manifest.nbytes)
        except OSError as error:
            raise WeightSyncError(
                f"cannot make an image of {manifest.nbytes} bytes for {manifest.policy} {manifest.version}: {error.strerror or error}",
                hint="an engine that takes changes needs the version's bytes in memory once: free some, or set weights.anchor_every = 1",
            ) from error
        self._tensors = layout

    def write(self, link: Link, start: int, data: memoryview) -> None:
        """Take bytes `start .. start + len(data)` of an anchor's parts; `held` is None until `reached`."""
        self.held, self._digests = None, None
        source = np.frombuffer(data, np.uint8)
        for piece in placed(link.pieces, start, len(source)):
            if piece.start < 0 or piece.start + piece.nbytes > len(self._bytes):
                raise WeightSyncError(
                    f"anchor {link.version}: expected bytes within {len(self._bytes)}, got {piece.nbytes} at {piece.start}"
                )
            self._bytes[piece.start : piece.start + piece.nbytes] = source[piece.stored - start : piece.stored - start + piece.nbytes]

    def apply(self, link: Link, parts: Sequence[memoryview]) -> None:
        """Apply the changes of one link, all of its parts: the image holds the link's version then, and none after an error.

        Raises:
            WeightSyncError: a block is damaged or is of a tensor that the image does not have.
        """
        self.held = None
        blocks = [block for part in parts for block in read_blocks(part)]
        for block in blocks:
            spec = self._tensors.get(block.header.name)
            if spec is None or ITEM_BYTES[spec.dtype] != block.header.item:
                raise WeightSyncError(f"expected changes of this model's tensors, got some of {block.header.name!r}")
        sums = list(self._pool.map(lambda block: apply_block(block, self._tensor(self._tensors[block.header.name])), blocks))
        if self._digests is not None:
            for block, change in zip(blocks, sums, strict=True):
                name = block.header.name
                self._digests[name] = (self._digests[name] + change) & MASK
        self.held = link.version

    def reached(self, version: Version) -> None:
        """All bytes of an anchor have been written."""
        self.held = version

    def check(self, manifest: Manifest) -> None:
        """Compare every tensor's digest with the manifest's; the image holds nothing any more when one differs.

        After changes alone only the changed elements have been digested; after an anchor all are.

        Raises:
            WeightSyncError: naming the first tensor that differs.
        """
        if self._digests is None:
            self._digests = self._computed()
        for spec in manifest.tensors:
            got = digest_text(self._digests[spec.name])
            if got != spec.digest:
                self.held, self._digests = None, None
                raise WeightSyncError(
                    f"tensor {spec.name!r} of {manifest.policy} {manifest.version}: expected digest {spec.digest}, got {got} "
                    "from its anchor and changes",
                    hint="the anchor is fetched again at the next attempt",
                    tensor=spec.name,
                )

    def close(self) -> None:
        """Free the memory. Who has mapped the file keeps its mapping."""
        self.held, self._digests, self._tensors = None, None, {}
        self._bytes = np.empty(0, np.uint8)
        self._release()
        self._descriptor = None

    def _tensor(self, spec: TensorSpec) -> npt.NDArray[np.uint8]:
        return self._bytes[spec.offset : spec.offset + spec.nbytes]

    def _computed(self) -> dict[str, int]:
        blocks = [
            (
                name,
                ITEM_BYTES[spec.dtype],
                first,
                self._tensor(spec)[first * ITEM_BYTES[spec.dtype] :][: BLOCK_ELEMENTS * ITEM_BYTES[spec.dtype]],
            )
            for name, spec in self._tensors.items()
            for first in range(0, math.prod(spec.shape), BLOCK_ELEMENTS)
        ]
        sums = dict.fromkeys(self._tensors, 0)
        for (name, *_), part in zip(blocks, self._pool.map(lambda one: tensor_digest(one[3], one[1], one[2]), blocks), strict=True):
            sums[name] = (sums[name] + part) & MASK
        return sums

    def _create(self, nbytes: int) -> None:
        self._descriptor, self._path, free = memory_file(f"streamrl-{self._name}")
        # The memory is the descriptor's: an image that is dropped unclosed must not keep it.
        self._release = weakref.finalize(self, free)
        # Reserving all pages first turns a lack of memory into an error here; a write to a mapping would be a SIGBUS.
        reserve(self._descriptor, nbytes)
        self._bytes = np.frombuffer(mmap.mmap(self._descriptor, nbytes), dtype=np.uint8)


def _nothing() -> None:
    """Nothing is held yet."""


def _place(spec: TensorSpec) -> tuple[str, tuple[int, ...], int]:
    return spec.dtype, tuple(spec.shape), spec.offset
