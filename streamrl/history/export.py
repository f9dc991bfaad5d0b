"""A version of a run as a model directory, without a GPU and without a trainer: from its checkpoint, or from its bytes on the log.

Nothing is held as a whole: a checkpoint's file is copied, or its parts are joined, and parts and changes from the bus go straight to where
they belong in the new file, which is then read back tensor by tensor against the version's digests.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError

from streamrl.bus.protocol import Bus
from streamrl.bus.reading import stretch
from streamrl.config.tree import Config
from streamrl.consumers.training.calls import Caller
from streamrl.errors import CheckpointDamaged, ConfigError, TrainingError, WeightSyncError
from streamrl.models.description import copy_description, read_config
from streamrl.models.directories import check_files, damaged, list_checkpoints, write_directory
from streamrl.models.tensor_files import WEIGHTS_FILE, NewTensors, TensorFiles, join_tensors
from streamrl.schemas.codec import decode
from streamrl.schemas.subjects import WEIGHTS, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Link, Manifest, TensorSpec
from streamrl.system import check_new
from streamrl.tensors.concatenation import ITEM_BYTES
from streamrl.tensors.digest import MASK, digest_text, tensor_digest
from streamrl.tensors.names import KEPT
from streamrl.trainers.factory import make_trainer
from streamrl.weights.blobs import PartStore
from streamrl.weights.delta import BLOCK_ELEMENTS, apply_block, read_blocks
from streamrl.weights.links import routes
from streamrl.weights.ranks import placed

logger = logging.getLogger(__name__)

_TYPES = ("float32", "bfloat16", "float16")
"""Of weights that a model directory can be described by."""
Way = tuple[Link, ...]


class Found(msgspec.Struct, frozen=True):
    """Where versions can be exported from."""

    checkpoints: Mapping[Version, Path]
    log: Mapping[Version, tuple[Manifest, Way]]
    """Those whose bytes are on the bus, with the way that leads there."""

    @property
    def versions(self) -> list[Version]:
        """All of them, oldest first."""
        return sorted({*self.checkpoints, *self.log}, key=lambda version: (version.epoch, version.number))


async def find_versions(config: Config, bus: Bus, checkpoints: Path) -> Found:
    """What there is of a run: complete checkpoints of its trainer, and versions all of whose bytes are on the bus."""
    on_log: dict[Version, tuple[Manifest, Way]] = {}
    if not config.trainer.tabular:
        stored = set(await bus.blobs.names())
        state = await bus.state(WEIGHTS)
        async for message in stretch(bus, WEIGHTS, first=state.first, last=state.last, subject=Subjects(config.run.name).weights("policy")):
            manifest = decode(message.body, Manifest, where=f"{message.subject} sequence {message.sequence}")
            if (way := _way(manifest, stored)) is not None:
                on_log[manifest.version] = (manifest, way)
    return Found(dict(list_checkpoints(checkpoints, f"{config.trainer.name}-")), on_log)


def choose(found: Found, wanted: str | None) -> Version:
    """The version that `wanted` names (`17`, of the newest epoch that has it, or `0.17`), or the newest.

    Raises:
        ConfigError: it is not there any more, or nothing is; names the versions that are.
    """
    versions = found.versions
    named = [version for version in versions if wanted in (None, str(version), str(version.number))]
    if named:
        return named[-1]
    there = ", ".join(map(str, versions)) or "none"
    raise ConfigError(
        f"expected a version that has a checkpoint or its bytes on the bus, got {wanted or 'none'}: there are {there}",
        hint="`streamrl replay` makes an older one again; trainer.export_every exports while a run trains",
        versions=tuple(map(str, versions)),
    )


async def export(config: Config, bus: Bus, model_dir: Path, found: Found, version: Version, out: Path) -> str:
    """Write the policy of a version as the directory `out`, whole or not at all; returns where it came from, in words.

    Args:
        config: the run's.
        bus: its bus, only read.
        model_dir: initial policy, whose description and tokenizer go with it.
        found: what there is.
        version: of those.
        out: new directory.

    Raises:
        ConfigError: `out` is there already.
        CheckpointDamaged: the checkpoint is not what was written, and its bytes are not on the bus.
        WeightSyncError: the bytes on the bus do not give the version's digests.
        TrainingError: it cannot be written, or is of a type that it cannot be described by.
    """
    await asyncio.to_thread(check_new, out)
    checkpoint, call = await asyncio.to_thread(_whole, found, version), Caller(asyncio.get_running_loop())
    hidden = out.with_name(f".{out.name}.exported")
    # Not by the name that a trainer writes the same directory under: whoever comes second takes what the first has begun for left over.

    def write(directory: Path) -> None:
        try:
            kept = TensorFiles(sorted(model_dir.glob("*.safetensors")), KEPT)
        except SafetensorError as error:
            raise damaged(model_dir, str(error)) from error
        path, model_type = directory / WEIGHTS_FILE, str(read_config(model_dir).get("model_type", ""))
        with kept:
            if checkpoint is not None:
                dtype = join_tensors(checkpoint, WEIGHTS_FILE, path, model_type=model_type, kept=kept)
            else:
                manifest, way = found.log[version]
                file, dtype = NewFile(path, manifest.tensors, kept), manifest.tensors[0].dtype
                call(fill(file, bus, manifest, way))
                file.check(manifest)
        if dtype not in _TYPES:
            raise TrainingError(f"expected weights of type {' or '.join(_TYPES)} in {checkpoint or version}, got {dtype}")
        copy_description(model_dir, directory, dtype)

    def work() -> None:
        if config.trainer.tabular:
            trainer = make_trainer(config, model_dir)
            trainer.load(found.checkpoints[version])
            trainer.export(hidden)
        else:
            write_directory(hidden, write)
        try:
            os.rename(hidden, out)
        except OSError:
            shutil.rmtree(hidden)
            check_new(out)
            raise

    await asyncio.to_thread(work)
    return f"checkpoint {checkpoint.name}" if checkpoint is not None else "the bus"


async def fill(file: NewFile, bus: Bus, manifest: Manifest, way: Way) -> None:
    """Have the bytes of a version put into a new file: an anchor's, and then what each following version has changed."""
    store = PartStore(bus.blobs)
    for link in way:
        async with contextlib.aclosing(store.get(link.parts, what=f"{manifest.policy} {link.version}")) as parts:
            async for part, data in parts:
                if link.parent is None:
                    await asyncio.to_thread(file.write, link, part.offset, data)
                else:
                    await asyncio.to_thread(file.apply, data)


class NewFile:
    """A safetensors file that is filled with a version's bytes in any order.

    Args:
        path: of the file.
        tensors: of the version, by `offset` in the concatenation that manifests speak of.
        kept: tensors of the initial policy that are copied, but for those that the version has.

    Raises:
        OSError: there is no room.
        TrainingError: a tensor is of a type that safetensors does not know.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec], kept: TensorFiles) -> None:
        self._tensors = sorted(tensors, key=lambda spec: spec.offset)
        own = {spec.name: (spec.dtype, tuple(spec.shape)) for spec in self._tensors}
        self._file = NewTensors(path, {**kept.layout, **own})
        for name in kept.layout.keys() - own.keys():
            kept.copy(name, self._file.bytes(name))

    def write(self, link: Link, start: int, data: memoryview) -> None:
        """Take bytes `start .. start + len(data)` of an anchor's parts, without what pads the concatenation."""
        source = np.frombuffer(data, np.uint8)
        for piece in placed(link.pieces, start, len(source)):
            first = bisect.bisect_right(self._tensors, piece.start, key=lambda spec: spec.offset + spec.nbytes)
            for spec in self._tensors[first:]:
                low, high = max(piece.start, spec.offset), min(piece.start + piece.nbytes, spec.offset + spec.nbytes)
                if low >= high:
                    break
                at = piece.stored - start + low - piece.start
                self._file.bytes(spec.name)[low - spec.offset : high - spec.offset] = source[at : at + high - low]

    def apply(self, data: memoryview) -> None:
        """Apply a part of changes; raises WeightSyncError for one of other tensors."""
        specs = {spec.name: spec for spec in self._tensors}
        for block in read_blocks(data):
            spec = specs.get(block.header.name)
            if spec is None or ITEM_BYTES[spec.dtype] != block.header.item:
                raise WeightSyncError(f"expected changes of this model's tensors, got some of {block.header.name!r}")
            apply_block(block, self._file.bytes(spec.name))

    def check(self, manifest: Manifest) -> None:
        """Raise WeightSyncError unless every tensor has the manifest's digest."""
        for spec in self._tensors:
            item, held, total = ITEM_BYTES[spec.dtype], self._file.bytes(spec.name), 0
            for first in range(0, math.prod(spec.shape), BLOCK_ELEMENTS):
                total = (total + tensor_digest(held[first * item : (first + BLOCK_ELEMENTS) * item], item, first)) & MASK
            if (got := digest_text(total)) != spec.digest:
                raise WeightSyncError(
                    f"tensor {spec.name!r} of {manifest.policy} {manifest.version}: expected digest {spec.digest}, got {got} from the bus",
                    tensor=spec.name,
                )


def _way(manifest: Manifest, stored: set[str]) -> Way | None:
    """The way to a version of which every blob is stored; None: there is none."""
    links = manifest.links.get("bus", ())
    parts = manifest.parts if manifest.transport == "bus" else manifest.mirrors.get("bus")
    if not links and parts:
        links = (Link(version=manifest.version, parts=parts, pieces=manifest.pieces),)
    try:
        ways = routes(links, manifest.version) if links else ()
    except WeightSyncError:
        return None
    return next((way for way in ways if all(part.location in stored for link in way for part in link.parts)), None)


def _whole(found: Found, version: Version) -> Path | None:
    """The version's checkpoint, read through; None: there is none, or it is damaged and the bytes are on the bus."""
    checkpoint = found.checkpoints.get(version)
    if checkpoint is None:
        return None
    try:
        check_files(checkpoint)
    except CheckpointDamaged as error:
        if version not in found.log:
            raise
        logger.warning("event=checkpoint_passed_over error=%s", error.message)
        return None
    return checkpoint
