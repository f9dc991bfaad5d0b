"""Megatron-core's distributed checkpoint (`torch_dist`), read and written piece by piece with torch alone.

```text
DEST/latest_checkpointed_iteration.txt      "release", or the number of an iteration
DEST/release/metadata.json, common.pt       format; arguments of the run
DEST/release/.metadata, __0_0.distcp        torch.distributed.checkpoint: which box of which tensor is where; the boxes
```
A tensor is the whole model's, whatever mesh wrote it. Those of layers have an axis for the layer in front, those of experts another one
behind it: `decoder.layers.self_attention.linear_qkv.weight` [layers, rows, hidden].
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from streamrl.errors import CheckpointDamaged, ConfigError
from streamrl.models.megatron.metadata import UNREADABLE, Reader
from streamrl.models.megatron.names import Architecture, Parameter, Place, parameters

TRACKER = "latest_checkpointed_iteration.txt"
_NOT_MODEL = ("optimizer.", "chained_", "rng_state", "rerun_state")
"""Prefixes of names in the file that are not the model's."""
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms have the names of Transformer Engine's fused layers in the file, which the local layers take them from too."""


class Piece(NamedTuple):
    """Rows of a parameter of the whole model, and where they are in the file."""

    parameter: Parameter
    key: str
    """Name of the tensor in the file."""
    place: tuple[int, ...]
    """Indices of the parameter along the axes that the file's tensor has in front: layer, expert."""
    leading: tuple[int, ...]
    """Length of these axes."""
    rows: range
    """Rows of the parameter."""

    @property
    def offset(self) -> tuple[int, ...]:
        """Index of the first element in the file's tensor."""
        return (*self.place, self.rows.start, *(0 for _ in self.parameter.shape[1:]))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows."""
        return (len(self.rows), *self.parameter.shape[1:])


def pieces(arch: Architecture) -> Iterator[Piece]:
    """The parameters of the whole model as whole pieces, in the order of the model.

    Of a mixture of experts the norm before the experts comes twice: Transformer Engine's layers look for it under its own name, the local
    layers where a dense model has it. A reader takes the first.
    """
    for one in parameters(arch, Place()):
        axes = [(one.layer, arch.layers), (one.expert, arch.experts)]
        place = tuple(at for at, _ in axes if at is not None)
        leading = tuple(size for at, size in axes if at is not None)
        for key in _keys(arch, one.name):
            yield Piece(one, key, place, leading, range(one.shape[0]))


def _keys(arch: Architecture, name: str) -> list[str]:
    name = re.sub(r"^decoder\.layers\.\d+\.", "decoder.layers.", name)
    name = re.sub(r"\.local_experts\.\d+\.", ".experts.", name)
    inner = name.removeprefix("decoder.layers.")
    if inner not in _NORMS:
        return [name]
    fused = f"decoder.layers.{_NORMS[inner]}"
    return [name, fused] if arch.experts and inner.startswith("pre_mlp") else [fused]


def extra_states(arch: Architecture) -> list[str]:
    """Keys of what Megatron expects besides: a state of each linear layer, which is nothing without fp8.

    Example: `decoder.layers.self_attention.linear_qkv._extra_state/shard_0_36` of the first of 36 layers.
    """
    dense = ["self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"]
    dense += [] if arch.experts else ["mlp.linear_fc1", "mlp.linear_fc2"]
    found: list[str] = []
    for layer in range(arch.layers):
        found += [f"decoder.layers.{name}._extra_state/shard_{layer}_{arch.layers}" for name in dense]
        for expert in range(arch.experts):
            places = f"shard_{layer}.{expert}_{arch.layers}.{arch.experts}"
            found += [f"decoder.layers.mlp.experts.experts.{name}._extra_state/{places}" for name in ("linear_fc1", "linear_fc2")]
    return found


def write(
    directory: Path,
    arch: Architecture,
    todo: Sequence[Piece],
    types: Mapping[str, torch.dtype],
    resolve: Callable[[Piece], Tensor],
) -> None:
    """Write a checkpoint's directory (`release`), holding one piece at a time.

    Args:
        directory: new.
        arch: of the whole model.
        todo: pieces that make up whole tensors.
        types: of the tensors, by key.
        resolve: gives the elements of a piece, `Piece.shape`.

    Raises:
        OSError: it cannot be written; RuntimeError where torch hides that.
    """
    directory.mkdir()
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=False, thread_count=1)
    planner = _Lazy(todo, extra_states(arch), types, resolve)
    planner.set_up_planner({}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])
    torch.save({"args": _arguments(arch), "checkpoint_version": 3.0, "iteration": 0}, directory / "common.pt")
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(said), encoding="utf-8")


def _arguments(arch: Architecture) -> argparse.Namespace:
    """Say what Megatron-LM compares with its own arguments, and what converters of others read the sizes from.

    The mesh stands there because it is looked for; the file does not depend on it.
    """
    made = argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, world_size=1)
    made.num_layers, made.hidden_size, made.kv_channels = arch.layers, arch.hidden, arch.head_dim
    made.num_attention_heads, made.num_query_groups = arch.heads, arch.kv_heads
    made.group_query_attention, made.num_experts = arch.heads != arch.kv_heads, arch.experts or None
    made.untie_embeddings_and_output_weights = not arch.tied
    setattr(made, "moe_ffn_hidden_size" if arch.experts else "ffn_hidden_size", arch.intermediate)
    return made


class _Lazy(DefaultSavePlanner):
    """Has torch write pieces that are made when their turn comes."""

    def __init__(
        self,
        todo: Sequence[Piece],
        extra: Sequence[str],
        types: Mapping[str, torch.dtype],
        resolve: Callable[[Piece], Tensor],
    ) -> None:
        super().__init__()
        self._todo = {(one.key, one.offset): one for one in todo}
        self._extra = extra
        self._types = types
        self._resolve = resolve

    def create_local_plan(self) -> SavePlan:
        tensors = [self._item(one) for one in self._todo.values()]
        nothing = [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._extra]
        self.plan = SavePlan(tensors + nothing, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save([None], data)  # Megatron keeps a list of one
            return data
        assert write_item.index.offset is not None
        one = self._todo[write_item.index.fqn, tuple(write_item.index.offset)]
        return self._resolve(one).view((1,) * len(one.leading) + one.shape)

    def _item(self, one: Piece) -> WriteItem:
        index = MetadataIndex(one.key, one.offset)
        chunk = ChunkStorageMetadata(torch.Size(one.offset), torch.Size((1,) * len(one.leading) + one.shape))
        data = TensorWriteData(chunk, TensorProperties(dtype=self._types[one.key]), torch.Size((*one.leading, *one.parameter.shape)))
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


class Saved:
    """A distributed checkpoint that is read piece by piece.

    Args:
        directory: the one with `.metadata` in it, or one above with the file that names it.

    Raises:
        ConfigError: it is not one.
        CheckpointDamaged: a file is missing or shorter than what it should hold.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = found = _release(directory)
        try:
            self._reader = Reader(found)
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, True)
            self.tensors = {key: one for key, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)}
            self._check_files()
        except UNREADABLE as error:
            raise _damaged(found / ".metadata", f"it cannot be read: {error}") from error

    def check(self, arch: Architecture) -> dict[str, torch.dtype]:
        """Raise ConfigError unless the model in the file is `arch`; returns the types of its tensors."""
        wanted: dict[str, Piece] = {}
        for one in pieces(arch):
            wanted.setdefault(one.key, one)
        types: dict[str, torch.dtype] = {}
        for key, one in wanted.items():
            if key not in self.tensors and not _second(arch, key, self.tensors):
                hint = "a checkpoint with one tensor a layer (non-homogeneous layers) is not read" if one.leading else ""
                raise _unlike(self.directory, f"a tensor {key}", "none", hint)
            try:
                if key in self.tensors:
                    types[key] = self._checked(arch, key, one)
            except UNREADABLE as error:
                raise _damaged(self.directory / ".metadata", f"{key} cannot be read: {error}") from error
        model = (key for key in self.tensors if not key.startswith(_NOT_MODEL) and "_extra_state" not in key)
        if other := [key for key in model if key not in wanted]:
            raise _unlike(self.directory, f"the tensors of a {arch.model_type}", f"{other[0]} too", "another architecture, or its options")
        return types

    def ranges(self, one: Piece) -> Iterator[Piece]:
        """The same piece by rows: of embedding and output layer, which are large, as they were saved."""
        if one.leading or len(one.parameter.parts) > 1:
            yield one
            return
        edges = {chunk.offsets[0] for chunk in self.tensors[one.key].chunks} | {0, one.rows.stop}
        inside = sorted(edge for edge in edges if edge <= one.rows.stop)
        for first, end in itertools.pairwise(inside):
            yield one._replace(rows=range(first, end))

    def read(self, one: Piece) -> Tensor:
        """The elements of a piece, `Piece.shape`."""
        metadata = self.tensors[one.key]
        shape = (1,) * len(one.leading) + one.shape
        found = torch.empty(shape, dtype=metadata.properties.dtype)
        box = ChunkStorageMetadata(torch.Size(one.offset), torch.Size(shape))
        items = create_read_items_for_chunk_list(one.key, metadata, [box])
        filled = {tuple(item.dest_offsets): math.prod(item.lengths) for item in items}
        if len(filled) < len(items) or sum(filled.values()) != math.prod(shape):
            raise _damaged(self.directory / ".metadata", f"{one.key} at {list(one.offset)} is not there whole, or twice")
        try:
            self._reader.read_data(LoadPlan(items), _Into(found)).wait()
        except (RuntimeError, AssertionError, *UNREADABLE) as error:
            said = f"{one.key} cannot be read: {error}".splitlines()[0]
            raise _damaged(self.directory / self._reader.storage_data[items[0].storage_index].relative_path, said) from error
        return found.view(one.shape)

    def _checked(self, arch: Architecture, key: str, one: Piece) -> torch.dtype:
        got, expected = tuple(self.tensors[key].size), (*one.leading, *one.parameter.shape)
        vocabulary = one.parameter.shape == (arch.vocabulary, arch.hidden) and not one.leading
        if got != expected and not (vocabulary and got[0] > expected[0] and got[1:] == expected[1:]):
            raise _unlike(self.directory, f"{key} of shape {list(expected)}", f"{list(got)}", "is --model of this model?")
        chunks = self.tensors[key].chunks
        if (count := sum(math.prod(chunk.sizes) for chunk in chunks)) != math.prod(got):
            raise _damaged(self.directory / ".metadata", f"{key} of {math.prod(got)} elements has {count} in the files")
        if lost := [chunk for chunk in chunks if MetadataIndex(key, chunk.offsets) not in self._reader.storage_data]:
            raise _damaged(self.directory / ".metadata", f"{key} from {list(lost[0].offsets)} on is in no file")
        return self.tensors[key].properties.dtype

    def _check_files(self) -> None:
        held: dict[str, list[tuple[int, int]]] = {}
        for place in self._reader.storage_data.values():
            held.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
        for name, stretches in held.items():
            path = self.directory / name
            if path.parent != self.directory:
                raise _damaged(self.directory / ".metadata", f"it names a file elsewhere, {name!r}")
            if any(first[1] > second[0] for first, second in itertools.pairwise(sorted(stretches))):
                raise _damaged(self.directory / ".metadata", f"it has two tensors in the same bytes of {name}")
            end, got = max(stretches)[1], path.stat().st_size if path.is_file() else None
            if got is None or got < end:
                raise _damaged(path, f"expected {end} bytes at least, got {'no file' if got is None else got}")


class _Into(DefaultLoadPlanner):
    """Has torch put what it reads into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        found = self._target
        for dimension, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dimension, first, length)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        del read_item, tensor  # it is there


def _second(arch: Architecture, key: str, there: Mapping[str, Any]) -> bool:
    """Say if the other one of a norm's two names is there."""
    names = _keys(arch, "decoder.layers.0.pre_mlp_layernorm.weight")
    return key in names and any(name in there for name in names)


def _release(directory: Path) -> Path:
    tracker, found = directory / TRACKER, directory
    if tracker.is_file():
        said = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if said != "release" and not said.isdecimal():
            raise _damaged(tracker, f"expected `release` or a number, got {said[:50]!r}")
        found = directory / (said if said == "release" else f"iter_{int(said):07d}")
    if not (found / ".metadata").is_file():
        raise ConfigError(
            f"expected a distributed checkpoint in {found}, got a directory without .metadata",
            hint="Megatron's format `torch_dist` is read; the older `torch` and `zarr` are not",
            path=str(found),
        )
    return found


def _unlike(where: Path, expected: str, got: str, hint: str) -> ConfigError:
    return ConfigError(f"{where}: expected {expected}, got {got}", hint=hint, path=str(where))


def _damaged(path: Path, problem: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{path}: {problem}", hint="copy the checkpoint again", path=str(path), problem=problem)
