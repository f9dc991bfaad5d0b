"""Tensors of a checkpoint in safetensors files: one file for all, or one for each part of a model that is cut, in a folder of that part.

```text
checkpoint/meta.json, random.safetensors, extra.bin, ...
checkpoint/part-1-of-2/model.safetensors      rows (dimension 0) of every tensor, with their offsets in the header
checkpoint/part-2-of-2/model.safetensors
```
The files are those of torch.distributed.checkpoint's `HuggingFaceStorageWriter` (key `DCP_SHARDING_INFO` of the header), whose reader
reads them. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from streamrl.models.directories import damaged
from streamrl.tensors.mesh import Mesh
from streamrl.tensors.names import named

OFFSETS = "DCP_SHARDING_INFO"
"""Key of a header's metadata: JSON of the offset of each tensor's first element."""
_COPY_BYTES = 64 << 20


class Piece(NamedTuple):
    """Rows of a tensor in a file, or columns of all of its rows."""

    file: Path
    first: int
    """Of these rows in the whole tensor."""
    rows: int
    begin: int
    """Place in the file."""
    nbytes: int
    column: int = 0
    """First one of these in the whole tensor."""

    def read(self) -> Iterator[bytes]:
        """The rows' bytes, some at a time; raises CheckpointDamaged where the file ends early."""
        with self.file.open("rb") as source:
            source.seek(self.begin)
            left = self.nbytes
            while left:
                if not (data := source.read(min(left, _COPY_BYTES))):
                    raise damaged(self.file.parent, f"{self.file.name} ends early")
                left -= len(data)
                yield data


class Stored(NamedTuple):
    """A tensor and where its rows are, in their order."""

    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    columns: bool = False
    """Whether it is a matrix of which each piece has some columns."""

    def read(self) -> Iterator[bytes]:
        """The tensor's bytes in C order, some at a time; raises as `Piece.read`."""
        if not self.columns:
            for piece in self.pieces:
                yield from piece.read()
            return
        # Example, a matrix of 2 rows in two pieces: row 0 of the first, row 0 of the second, row 1 of the first, row 1 of the second.
        with ExitStack() as stack:
            files = [stack.enter_context(piece.file.open("rb")) for piece in self.pieces]
            for row in range(self.shape[0]):
                for piece, file in zip(self.pieces, files, strict=True):
                    nbytes = piece.nbytes // piece.rows
                    file.seek(piece.begin + row * nbytes)
                    if len(data := file.read(nbytes)) != nbytes:
                        raise damaged(piece.file.parent, f"{piece.file.name} ends early")
                    yield data

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return sum(piece.nbytes for piece in self.pieces)


_NO_TENSORS: Mapping[str, Stored] = MappingProxyType({})


def part_folder(mesh: Mesh, part: int) -> str:
    """Name of the folder of one of a mesh's parts."""
    return f"part-{part + 1}-of-{mesh.shard}"


def offsets_text(offsets: Mapping[str, tuple[int, ...]]) -> str:
    """What stands under `OFFSETS` in the header of a file."""
    return json.dumps({name: {"saved_offsets": offset} for name, offset in offsets.items()})


def find_tensors(checkpoint: Path, file: str) -> dict[str, Stored]:
    """The tensors of `file` in a checkpoint, however it was cut.

    Raises:
        CheckpointDamaged: a part is missing, or a header says what cannot be.
        OSError: a file is not there, or cannot be read.
    """
    found: dict[str, list[tuple[str, tuple[int, ...], Piece]]] = {}
    for path in _files(checkpoint, file):
        try:
            for name, dtype, shape, piece in _pieces(path):
                found.setdefault(name, []).append((dtype, shape, piece))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(checkpoint, f"the header of {path.relative_to(checkpoint)} cannot be read: {error}") from error
    return {name: _joined(checkpoint, name, pieces) for name, pieces in found.items()}


def join_tensors(checkpoint: Path, file: str, out: Path, *, model_type: str = "", kept: Mapping[str, Stored] = _NO_TENSORS) -> None:
    """Write the tensors of `file` of a checkpoint as one safetensors file `out`, without holding any; raises as `find_tensors`.

    Rows of several parts follow each other in the whole tensor, so its bytes are theirs, one after the other.

    Args:
        checkpoint: of any mesh.
        file: name of the file, in the checkpoint or in each of its parts.
        out: new file.
        model_type: architecture by whose names they are written (`streamrl.tensors.names`); empty: by those that they have.
        kept: tensors from elsewhere that are copied behind them, but for those that the checkpoint has.
    """
    own = find_tensors(checkpoint, file)
    tensors = {**own, **{name: one for name, one in kept.items() if name not in own}}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, one in tensors.items():
        begin, end = end, end + one.nbytes
        found = list(named(model_type, name, one.shape))
        sizes = [one.nbytes // max(1, math.prod(one.shape)) * each.numel for each in found] if len(found) > 1 else [one.nbytes]
        for each, nbytes in zip(found, sizes, strict=True):
            header[each.name] = {"dtype": one.dtype, "shape": each.shape, "data_offsets": [begin, begin + nbytes]}
            begin += nbytes
    with out.open("wb") as target:
        target.write(header_bytes(header))
        for one in tensors.values():
            target.writelines(one.read())


def header_bytes(header: Mapping[str, object]) -> bytes:
    """How a safetensors file with this header begins."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _files(checkpoint: Path, file: str) -> list[Path]:
    folders = {match[0]: match for path in checkpoint.glob("part-*") if (match := re.fullmatch(r"part-(\d+)-of-(\d+)", path.name))}
    if not folders:
        return [checkpoint / file]
    parts = int(next(iter(folders.values()))[2])
    expected = [part_folder(Mesh(shard=parts), part) for part in range(parts)]
    if sorted(expected) != sorted(folders):
        raise damaged(checkpoint, f"expected {parts} parts, got {', '.join(sorted(folders))}")
    return [checkpoint / name / file for name in expected]


def _pieces(path: Path) -> list[tuple[str, str, tuple[int, ...], Piece]]:
    with path.open("rb") as source:
        nbytes = int.from_bytes(source.read(8), "little")
        if nbytes > path.stat().st_size - 8:
            raise ValueError(f"it has {nbytes} bytes, the file fewer")
        header: dict[str, Any] = json.loads(source.read(nbytes))
    offsets = json.loads(header.pop("__metadata__", {}).get(OFFSETS, "{}"))
    found: list[tuple[str, str, tuple[int, ...], Piece]] = []
    for name, told in header.items():
        shape, (begin, end) = tuple(map(int, told["shape"])), map(int, told["data_offsets"])
        offset = tuple(map(int, offsets[name]["saved_offsets"])) if name in offsets else (0,) * len(shape)
        if (
            len(offset) != len(shape)
            or any(offset[2:])
            or (any(offset[1:]) and offset[0])
            or min((*shape, *offset, 0)) < 0
            or not 0 <= begin <= end
        ):
            raise ValueError(f"expected rows of {name!r}, got shape {shape} at {offset}")
        column = offset[1] if len(offset) > 1 else 0
        piece = Piece(path, offset[0] if offset else 0, shape[0] if shape else 1, 8 + nbytes + begin, end - begin, column)
        found.append((name, str(told["dtype"]), shape, piece))
    return found


def _joined(checkpoint: Path, name: str, found: list[tuple[str, tuple[int, ...], Piece]]) -> Stored:
    found = sorted(found, key=lambda one: (one[2].first, one[2].column))
    (dtype, shape, _), rows = found[0], 0
    if found[-1][2].column:
        return _beside(checkpoint, name, found)
    for other, part, piece in found:
        if piece.first != rows or other != dtype or part[1:] != shape[1:]:
            raise damaged(checkpoint, f"the parts of {name!r} do not fit together")
        rows += piece.rows
    return Stored(dtype, (rows, *shape[1:]) if shape else (), tuple(piece for _, _, piece in found))


def _beside(checkpoint: Path, name: str, found: list[tuple[str, tuple[int, ...], Piece]]) -> Stored:
    """Of pieces in the order of their columns."""
    (dtype, shape, _), column = found[0], 0
    for other, part, piece in found:
        if piece.column != column or other != dtype or len(part) != 2 or part[0] != shape[0] or piece.first:
            raise damaged(checkpoint, f"the parts of {name!r} do not fit together")
        column += part[1]
    return Stored(dtype, (shape[0], column), tuple(piece for _, _, piece in found), columns=True)
