"""A Hugging Face model directory as Megatron's distributed checkpoint, and back; one matrix is in memory at a time."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from streamrl.errors import CheckpointDamaged, ConfigError, TrainingError
from streamrl.models.description import copy_description, read_config
from streamrl.models.directories import write_directory
from streamrl.models.megatron.distributed import TRACKER, Piece, Saved, pieces, write
from streamrl.models.megatron.names import Architecture, Parameter, Part, architecture, tensors
from streamrl.models.tensor_files import WEIGHTS_FILE, Box, Bytes, Layout, NewTensors, TensorFiles, host_bytes
from streamrl.system import check_new
from streamrl.tensors.concatenation import ITEM_BYTES

DESCRIPTION = "hf"
"""Folder beside a converted checkpoint with the model's description and tokenizer, by which it is converted back."""
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNUSED = ("rotary_emb.inv_freq",)
"""Ends the names of tensors in old checkpoints that models compute themselves."""
_ROWS_ELEMENTS = 1 << 26
"""Elements of embedding and output layer that are written at a time."""


class Converted(NamedTuple):
    """Counts what a conversion wrote."""

    to: str
    """`megatron` or `hf`."""
    tensors: int
    """Tensors of the Hugging Face checkpoint."""
    nbytes: int
    """Bytes of these."""


def convert(source: Path, dest: Path, model: Path | None = None, *, file_bytes: int = 5_000_000_000) -> Converted:
    """Convert in the direction that `source` says; `dest` comes whole or not at all.

    Args:
        source: a Hugging Face model directory (config.json, *.safetensors), or Megatron's: the directory with
            latest_checkpointed_iteration.txt in it, or that of one iteration.
        dest: new directory.
        model: of the same model, whose description and tokenizer a Hugging Face directory is made with. Without it those that `source` has
            from its conversion.
        file_bytes: of the weights in a Hugging Face directory go into one file, at most; a tensor is in one file.

    Raises:
        ConfigError: `dest` is there, `source` is neither, the architecture is unknown, or tensors are not those of the description.
        CheckpointDamaged: a file of `source` is truncated or missing.
        TrainingError: `dest` cannot be written.
    """
    check_new(dest)
    if (source / "config.json").is_file() and not (source / ".metadata").is_file():
        if model is not None:
            raise ConfigError(
                f"expected Megatron's checkpoint for --model {model}, got the model directory {source}",
                hint="a model directory has its own config.json: leave --model out",
                path=str(source),
            )
        arch, nbytes, fill = _to_megatron(source)
        to = "megatron"
    elif (source / TRACKER).is_file() or (source / ".metadata").is_file():
        arch, nbytes, fill = _to_hugging_face(source, model, file_bytes)
        to = "hf"
    else:
        raise ConfigError(
            f"expected a model directory or Megatron's checkpoint, got {source} with neither config.json nor {TRACKER} nor .metadata",
            hint="name the directory that holds one of these",
            path=str(source),
        )
    _check_room(dest, nbytes)

    def guarded(directory: Path) -> None:
        try:
            fill(directory)
        except RuntimeError as error:  # torch gives an OSError of its files as one
            raise OSError(str(error)) from error

    write_directory(dest, guarded, replace=False)
    return Converted(to, len(tensors(arch)), nbytes)


def _to_megatron(source: Path) -> tuple[Architecture, int, Callable[[Path], None]]:
    arch = architecture(read_config(source), str(source / "config.json"))
    model = _Model(source)
    model.check(arch)
    todo = [row for one in pieces(arch) for row in _rows(one)]
    types = _types(source, ((one.key, model.dtype(one.parameter)) for one in todo))

    def value(one: Piece) -> Tensor:
        found = torch.empty(one.shape, dtype=types[one.key])
        for part, view in _boxes(one, found):
            view.copy_(model.box(part).view(view.shape))
        return found

    def fill(directory: Path) -> None:
        write(directory / "release", arch, todo, types, value)
        (directory / TRACKER).write_text("release", encoding="utf-8")
        (directory / DESCRIPTION).mkdir()
        copy_description(source, directory / DESCRIPTION)

    return arch, sum(math.prod(one.shape) * types[one.key].itemsize for one in todo), fill


def _to_hugging_face(source: Path, model: Path | None, file_bytes: int) -> tuple[Architecture, int, Callable[[Path], None]]:
    saved = Saved(source)
    beside = [folder / DESCRIPTION for folder in (source, source.parent) if (folder / DESCRIPTION / "config.json").is_file()]
    if model is None and not beside:
        raise ConfigError(
            f"expected the model's config.json, got none beside {source}",
            hint="name the Hugging Face directory of the same model with --model",
            path=str(source),
        )
    described = model or beside[0]
    arch = architecture(read_config(described), str(described / "config.json"))
    types = saved.check(arch)
    todo = _first_of_each(one for one in pieces(arch) if one.key in types)
    whole = {part.name: (_name(types[one.key]), part.shape) for one in todo for part in one.parameter.parts}
    for name, (dtype, _) in whole.items():
        if dtype not in _TYPES:
            raise _unlike(saved.directory, f"{name} of {', '.join(_TYPES)}", dtype)

    def fill(directory: Path) -> None:
        copy_description(described, directory, _name(types["embedding.word_embeddings.weight"]))
        files = _Files(directory, whole, file_bytes)
        for one in todo:
            for rows in saved.ranges(one):
                for part, view in _boxes(rows, saved.read(rows)):
                    files.append(part.name, view)
        files.check()

    return arch, sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in whole.values()), fill


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _types(source: Path, found: Iterable[tuple[str, torch.dtype]]) -> dict[str, torch.dtype]:
    """Map each tensor in Megatron's file, which is of all layers and experts, to its one type."""
    types: dict[str, torch.dtype] = {}
    for key, dtype in found:
        if types.setdefault(key, dtype) != dtype:
            raise _unlike(source, f"one type for {key} of all layers", f"{types[key]} and {dtype}")
    return types


def _boxes(one: Piece, value: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Each tensor's part of a piece, and its view of `value` (runs x rows of a run x rest).

    Some rows of a parameter are a piece only where it is rows of one tensor; the part is then of these rows.
    """
    for part in one.parameter.parts:
        if len(one.rows) == one.parameter.shape[0]:
            yield part, value.unflatten(0, (-1, part.period))[:, part.first : part.first + part.run]
        else:
            yield part._replace(offset=(one.rows.start, *part.offset[1:]), held=one.shape), value.unsqueeze(0)


def _rows(one: Piece) -> Iterator[Piece]:
    """A large embedding or output layer, some rows at a time; example: 10 rows, 4 at a time: 0 .. 3, 4 .. 7, 8 and 9."""
    step = max(1, _ROWS_ELEMENTS // math.prod(one.parameter.shape[1:]))
    if one.leading or len(one.rows) <= step:
        yield one
        return
    for first in range(0, one.rows.stop, step):
        yield one._replace(rows=range(first, min(first + step, one.rows.stop)))


def _first_of_each(found: Iterable[Piece]) -> list[Piece]:
    return list({one.parameter.name: one for one in reversed(list(found))}.values())[::-1]


class _Model:
    """The tensors of a Hugging Face directory; a box is read at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"expected *.safetensors in {directory}, got none", hint="convert older formats first", path=str(directory))
        try:
            self._files = TensorFiles(files)
        except (SafetensorError, OSError) as error:
            raise CheckpointDamaged(str(error), hint="copy the model again", path=str(directory), problem=str(error)) from error

    def check(self, arch: Architecture) -> None:
        """Raise ConfigError unless the tensors are those of `arch`."""
        wanted, held = tensors(arch), self._files.tensors
        for name, shape in wanted.items():
            if name not in held:
                raise _unlike(self._directory, f"a tensor {name}", "none")
            if held[name].shape != shape:
                raise _unlike(self._directory, f"{name} of shape {list(shape)}", f"{list(held[name].shape)}")
            if held[name].dtype not in _TYPES:
                raise _unlike(self._directory, f"{name} of {', '.join(_TYPES)}", held[name].dtype)
        for name in held:
            if name not in wanted and not name.endswith(_UNUSED) and not (arch.tied and name == "lm_head.weight"):
                raise _unlike(self._directory, f"the tensors of a {arch.model_type}", f"{name} too")

    def dtype(self, one: Parameter) -> torch.dtype:
        """Return the type of the tensors in a parameter, which have one."""
        found = {part.name: self._files.tensors[part.name].dtype for part in one.parts}
        if len(set(found.values())) > 1:
            raise _unlike(self._directory, f"one type for {one.name}", ", ".join(f"{name} {kind}" for name, kind in found.items()))
        return _TYPES[next(iter(found.values()))]

    def box(self, part: Part) -> Tensor:
        """Its elements, `part.held`."""
        return self._files.read(part.name, Box(part.offset, part.held))


class _Files:
    """Safetensors files of which each tensor is written from the first byte to the last.

    Args:
        directory: where they go.
        whole: type and shape of each tensor.
        file_bytes: of a file, at most, unless one tensor is larger.
    """

    def __init__(self, directory: Path, whole: Layout, file_bytes: int) -> None:
        groups: list[dict[str, int]] = [{}]
        for name, (dtype, shape) in whole.items():
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            if groups[-1] and sum(groups[-1].values()) + nbytes > file_bytes:
                groups.append({})
            groups[-1][name] = nbytes
        count = len(groups)
        names = [f"model-{at + 1:05d}-of-{count:05d}.safetensors" if count > 1 else WEIGHTS_FILE for at in range(count)]
        self._left: dict[str, Bytes] = {}
        for file, group in zip(names, groups, strict=True):
            made = NewTensors(directory / file, {name: whole[name] for name in group})
            self._left |= {name: made.bytes(name) for name in group}
        if count > 1:
            places = {name: file for file, group in zip(names, groups, strict=True) for name in group}
            said = {"metadata": {"total_size": sum(sum(group.values()) for group in groups)}, "weight_map": places}
            (directory / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")

    def append(self, name: str, value: Tensor) -> None:
        """Write the next elements of a tensor."""
        data, left = host_bytes(value), self._left[name]
        left[: len(data)] = data
        self._left[name] = left[len(data) :]

    def check(self) -> None:
        """Raise RuntimeError unless all has been written."""
        if missing := [name for name, left in self._left.items() if len(left)]:
            raise RuntimeError(f"bytes of {missing[0]} are missing")


def _check_room(dest: Path, nbytes: int) -> None:
    there = next(folder for folder in dest.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < nbytes:
        gib = 1 << 30
        raise TrainingError(
            f"{dest}: expected {nbytes / gib:.1f} GiB free on its disk, got {free / gib:.1f} GiB",
            hint="name a directory on another disk",
            path=str(dest),
        )


def _unlike(where: Path, expected: str, got: str) -> ConfigError:
    hint = "its config.json is of another model, or has options that are not known here"
    return ConfigError(f"{where}: expected {expected}, got {got}", hint=hint, path=str(where))
