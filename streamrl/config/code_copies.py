"""Copies of the user's modules, made when a run starts: its workers import these, whatever is saved to the files meanwhile.

A module from a copy keeps its name and `__file__`, so that data beside it are found where they are; only its source is the copy's.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import msgspec

VARIABLE = "STREAMRL_CODE"
"""The folder of copies, in the environment of workers and of what they start."""
MOST_BYTES, MOST_FILES = 64 << 20, 4096
_INDEX = "files.json"


def make_copies(folder: Path, files: Iterable[Path]) -> str:
    """Copy the files into a folder, in place of what it has; returns why that is not done, or nothing. Raises OSError."""
    shutil.rmtree(folder, ignore_errors=True)
    found = {path: path.stat().st_size for path in sorted({path.resolve() for path in files})}
    if not found:
        return ""
    if len(found) > MOST_FILES or sum(found.values()) > MOST_BYTES:
        return f"{len(found)} files with {sum(found.values())} bytes are more than {MOST_FILES} files or {MOST_BYTES} bytes"
    index = dict[str, str]()
    for path in found:
        # By their whole path, so that two folders of the same layout stay apart.
        copy = folder / path.relative_to(path.anchor)
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        index[str(path)] = str(copy.relative_to(folder))
    (folder / _INDEX).write_bytes(msgspec.json.encode(index))
    return ""


def read_index(folder: Path) -> dict[Path, Path]:
    """Return each original's copy; empty where there are none."""
    try:
        index = msgspec.json.decode((folder / _INDEX).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}
    return {Path(path): folder / copy for path, copy in index.items()}


def changed(copies: Mapping[Path, Path]) -> list[Path]:
    """Originals that are not what was copied, or are gone."""
    return [path for path, copy in copies.items() if _bytes(path) != _bytes(copy)]


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def source_of(path: Path) -> Path:
    """Where the source of a module is read: its copy, in a worker of a run that has one."""
    return _copies().get(path.resolve(), path) if _copies() else path


def is_module(path: Path) -> bool:
    """True if there is such a file, or a copy of one that was there."""
    return source_of(path) != path or path.is_file()


def loader_of(name: str, path: Path) -> SourceFileLoader | None:
    """Return what loads the module from its copy; None: it has none."""
    use_copies()
    return _Loader(name, str(path)) if source_of(path) != path else None


def use_copies() -> None:
    """Have this process import copies where there are some."""
    if _copies() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder({path.parent.name if path.stem == "__init__" else path.stem for path in _copies()}))


def _copies() -> dict[Path, Path]:
    return _in_folder(os.environ.get(VARIABLE, ""))


@cache
def _in_folder(folder: str) -> dict[Path, Path]:
    return read_index(Path(folder)) if folder else {}


class _Loader(SourceFileLoader):
    """Loads a module's copy. No bytecode is read or written, which would be the original's."""

    def get_data(self, path: str) -> bytes:
        return source_of(Path(path)).read_bytes()

    def path_stats(self, path: str) -> Mapping[str, object]:
        raise OSError("what is copied has no bytecode")


class _Finder:
    """Finds modules that were copied, in the places in which Python looks for them, and no others.

    Args:
        names: their last names.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        name = fullname.rpartition(".")[2]
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            found = Path(spec.origin) if spec.origin else None
        else:
            places = (Path(folder or ".").absolute() for folder in (sys.path if path is None else path))
            found = next((one for folder in places for one in _forms(folder / name) if source_of(one) != one), None)
        if found is None or source_of(found) == found:
            return None
        inside = [str(found.parent)] if found.name == "__init__.py" else None
        return spec_from_file_location(fullname, found, loader=_Loader(fullname, str(found)), submodule_search_locations=inside)


def _forms(place: Path) -> tuple[Path, Path]:
    return place / "__init__.py", place.with_suffix(".py")
