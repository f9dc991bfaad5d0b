"""Tensors in safetensors files: one file for all, or one for each part of a model that is cut, in a folder of that part.

```text
checkpoint/meta.json, random.safetensors, extra.bin, ...
checkpoint/part-1-of-2/model.safetensors      rows (dimension 0) of every tensor, with their offsets in the header
checkpoint/part-2-of-2/model.safetensors
```
The files are those of torch.distributed.checkpoint's `HuggingFaceStorageWriter` (key `DCP_SHARDING_INFO` of the header), whose reader
reads them. The library reads them here; `NewTensors` writes files larger than memory, which it cannot.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from streamrl.errors import TrainingError
from streamrl.models.directories import damaged
from streamrl.system import reserve
from streamrl.tensors.concatenation import ITEM_BYTES
from streamrl.tensors.names import named

if TYPE_CHECKING:
    from torch import Tensor

OFFSETS = "DCP_SHARDING_INFO"
"""Key of a header's metadata: JSON of the offset of each tensor's first element."""
WEIGHTS_FILE = "model.safetensors"
TYPES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names that safetensors has for torch's types."""
_NAMES = {name: dtype for dtype, name in TYPES.items()}
Bytes = npt.NDArray[np.uint8]
Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Type, as torch calls it, and shape of each tensor."""


class Box(NamedTuple):
    """A part of a tensor."""

    offset: tuple[int, ...]
    """Index of its first element in each dimension."""
    held: tuple[int, ...]
    """Its shape."""


class Piece(NamedTuple):
    """The box that a file has of a tensor: rows, or columns of all rows."""

    file: Path
    box: Box


class Stored(NamedTuple):
    """A tensor and where its pieces are, in their order."""

    dtype: str
    """As torch calls it; the name in the file of a type that `TYPES` lacks."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class TensorFiles:
    """Tensors that are read box by box; a context manager.

    Args:
        files: of safetensors; a tensor may have a piece in each.
        ending: ends the names of the tensors that are looked at.

    Raises:
        SafetensorError: a header cannot be read, or pieces do not make up a tensor.
        OSError: a file is not there, or cannot be read.
    """

    def __init__(self, files: Iterable[Path], ending: str | tuple[str, ...] = "") -> None:
        self._files: dict[Path, Any] = {}
        pieces: dict[str, list[tuple[str, Piece]]] = {}
        for path in files:
            try:
                self._files[path] = file = safe_open(path, "pt")
                offsets = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
                for name in filter(lambda name: name.endswith(ending), file.keys()):
                    held = file.get_slice(name)
                    shape = tuple(held.get_shape())
                    offset = tuple(map(int, offsets[name]["saved_offsets"])) if name in offsets else (0,) * len(shape)
                    pieces.setdefault(name, []).append((held.get_dtype(), Piece(path, Box(offset, shape))))
            except (SafetensorError, ValueError, KeyError, TypeError) as error:
                raise SafetensorError(f"{path.name} in {path.parent} cannot be read: {error}") from error
        self.tensors = {name: _joined(name, found) for name, found in pieces.items()}

    @property
    def layout(self) -> Layout:
        """Type and shape of each."""
        return {name: (one.dtype, one.shape) for name, one in self.tensors.items()}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *raised: object) -> None:
        self._files.clear()

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Read a box of a tensor, or all of it; where one file has all of the box, its memory may be the file's."""
        import torch  # not above: readers of other files here start faster

        one = self.tensors[name]
        offset, held = box or Box((0,) * len(one.shape), one.shape)
        found: list[tuple[tuple[int, ...], Tensor]] = []
        for piece in one.pieces:
            low = tuple(map(max, offset, piece.box.offset))
            high = tuple(min(first + size, start + count) for first, size, start, count in zip(offset, held, *piece.box, strict=True))
            if all(first < end for first, end in zip(low, high, strict=True)) or piece is one.pieces[0]:  # it tells the type
                low = tuple(map(min, low, high))
                where = tuple(slice(first - at, end - at) for first, end, at in zip(low, high, piece.box.offset, strict=True))
                source = self._files[piece.file]
                found.append((low, source.get_slice(name)[where] if where else source.get_tensor(name)))
        if len(found) == 1 and tuple(found[0][1].shape) == held:
            return found[0][1]
        whole = torch.empty(held, dtype=found[0][1].dtype)
        for low, strip in found:
            if strip.numel():
                whole[tuple(slice(at - first, at - first + size) for at, first, size in zip(low, offset, strip.shape, strict=True))] = strip
        return whole

    def copy(self, name: str, out: Bytes) -> None:
        """Copy the bytes of a tensor, in C order, to `out`, one piece at a time."""
        one = self.tensors[name]
        if not len(out):
            return
        rows = out.reshape(one.shape[0] if one.shape else 1, -1)
        for piece in one.pieces:
            strip = host_bytes(self.read(name, piece.box)).reshape(piece.box.held[0] if one.shape else 1, -1)
            first, column = (*piece.box.offset, 0, 0)[:2]
            begin = column * math.prod(one.shape[2:]) * ITEM_BYTES[one.dtype]
            rows[first : first + len(strip), begin : begin + strip.shape[1]] = strip


class NewTensors:
    """A safetensors file that is filled in any order. The disk has room for all of it from the start.

    Args:
        path: new file.
        tensors: those of a wider type come first, so that all are aligned; else they have this order.

    Raises:
        OSError: there is no room.
        TrainingError: a type is not one of `TYPES`.
    """

    def __init__(self, path: Path, tensors: Layout) -> None:
        for name, (dtype, _) in tensors.items():
            if dtype not in TYPES:
                raise TrainingError(f"expected tensors of type {', '.join(TYPES)} for {path}, got {name} of {dtype}", path=str(path))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda one: -ITEM_BYTES[one[1][0]]):
            begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
            header[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
            self._places[name] = begin, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        with path.open("wb") as file:
            reserve(file.fileno(), len(head) + end)
            file.write(head)
        self._bytes: Bytes = np.memmap(path, np.uint8, "r+", offset=len(head), shape=(end,)) if end else np.empty(0, np.uint8)

    def bytes(self, first: str, last: str = "") -> Bytes:
        """Return the bytes of a tensor in C order, or those from one tensor to another, to be written."""
        return self._bytes[self._places[first][0] : self._places[last or first][1]]


def host_bytes(tensor: Tensor) -> Bytes:
    """[nbytes] uint8 of a tensor's elements in C order; shares memory with it where it lies on the host."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def part_folder(part: int, parts: int) -> str:
    """Name of the folder of one of the parts of a model that is cut."""
    return f"part-{part + 1}-of-{parts}"


def part_files(checkpoint: Path, file: str) -> list[Path]:
    """List where `file` is in a checkpoint, in the order of its parts; raises CheckpointDamaged where one is missing."""
    folders = {match[0]: match for path in checkpoint.glob("part-*") if (match := re.fullmatch(r"part-(\d+)-of-(\d+)", path.name))}
    if not folders:
        return [checkpoint / file]
    parts = int(next(iter(folders.values()))[2])
    expected = [part_folder(part, parts) for part in range(parts)]
    if sorted(expected) != sorted(folders):
        raise damaged(checkpoint, f"expected {parts} parts, got {', '.join(sorted(folders))}")
    return [checkpoint / name / file for name in expected]


def join_tensors(checkpoint: Path, file: str, out: Path, *, model_type: str = "", kept: TensorFiles | None = None) -> str:
    """Write the tensors of `file` of a checkpoint as one safetensors file `out`, holding one piece at a time; returns the widest type.

    Args:
        checkpoint: of any mesh.
        file: name of the file, in the checkpoint or in each of its parts.
        out: new file.
        model_type: architecture by whose names they are written (`streamrl.tensors.names`); empty: by those that they have.
        kept: tensors from elsewhere that are copied too, but for those that the checkpoint has.

    Raises:
        CheckpointDamaged: a part is missing, or a header says what cannot be.
        TrainingError: a tensor is of a type that is not known here.
        OSError: a file is not there, or cannot be read or written.
    """
    try:
        with TensorFiles(part_files(checkpoint, file)) as own:
            split = {name: list(named(model_type, name, one.shape)) for name, one in own.tensors.items()}
            layout = {each.name: (own.tensors[name].dtype, each.shape) for name, found in split.items() for each in found}
            kept = kept or TensorFiles(())
            others = {name: one for name, one in kept.layout.items() if name not in own.tensors}
            made = NewTensors(out, layout | others)
            for name, found in split.items():
                own.copy(name, made.bytes(found[0].name, found[-1].name))
            for name in others:
                kept.copy(name, made.bytes(name))
    except SafetensorError as error:
        raise damaged(checkpoint, str(error)) from error
    return max((dtype for dtype, _ in layout.values()), key=ITEM_BYTES.__getitem__, default="no tensor")


def _joined(name: str, found: list[tuple[str, Piece]]) -> Stored:
    """Put pieces together that follow each other, in rows or, of a matrix, in columns."""
    found = sorted(found, key=lambda one: one[1].box.offset)
    dtype, whole = found[0][0], found[0][1].box.held
    axis = 1 if len(found) > 1 and any(found[-1][1].box.offset[1:]) else 0
    end = 0
    for other, (_, (offset, shape)) in found:
        expected = tuple(end if each == axis else 0 for each in range(len(whole)))
        if other != dtype or offset != expected or (*shape[:axis], *shape[axis + 1 :]) != (*whole[:axis], *whole[axis + 1 :]):
            raise SafetensorError(f"the parts of {name!r} do not fit together")
        end += shape[axis] if shape else 0
    if not whole and len(found) > 1:
        raise SafetensorError(f"{name!r} is in {len(found)} files")
    shape = tuple(end if each == axis else size for each, size in enumerate(whole))
    return Stored(_NAMES.get(dtype, dtype), shape, tuple(piece for _, piece in found))
