"""Arrow IPC files, and the directories that Hugging Face `datasets` saves, read by pyarrow alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamrl.errors import DataError

STATE_FILE = "state.json"
"""Of a saved `Dataset`: it names the shards in their order."""
SPLITS_FILE = "dataset_dict.json"
"""Of a saved `DatasetDict`: it names the folders of its splits."""


def arrow_files(path: Path) -> list[Path]:
    """The shards of a saved `Dataset`, or the file itself.

    Raises DataError for another directory, or one whose shards are not all there.
    """
    if not path.is_dir():
        return [path]
    if not (path / STATE_FILE).is_file() and (path / SPLITS_FILE).is_file():
        splits = _read(path / SPLITS_FILE).get("splits")
        named = ", ".join(map(str, splits)) if isinstance(splits, list) else "none"
        raise DataError(
            f"expected one split, got a dataset with the splits {named} in {path}", hint=f"name one, as in {path}/train", path=str(path)
        )
    if not (path / STATE_FILE).is_file():
        raise DataError(
            f"expected a file, or a directory that datasets' save_to_disk has written, got no {STATE_FILE} in {path}",
            hint="check the path; in a TOML file it is relative to its folder",
            path=str(path),
        )
    state = _read(path / STATE_FILE)
    shards = state.get("_data_files")
    found = [shard.get("filename") for shard in shards if isinstance(shard, dict)] if isinstance(shards, list) else []
    # A name is one of this directory: what it names elsewhere is not read.
    names = [name for name in found if isinstance(name, str) and name == Path(name).name]
    if not names or names != found:
        raise DataError(f"expected the names of shards in {path / STATE_FILE}, got none", hint="save the dataset again", path=str(path))
    if state.get("_indices_data_files"):
        raise DataError(
            f"expected the rows in their order in {path}, got a dataset with indices over them",
            hint="call flatten_indices() before save_to_disk",
            path=str(path),
        )
    files = [path / name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"expected the shards of {path}, got none called {missing[0]}", hint="copy all of its files", path=str(path))
    return files


def open_arrow(path: Path, files: list[Path]) -> Any:
    """The rows of all `files` as one table of mapped memory (streams, as `datasets` writes them, or files); raises DataError."""
    import pyarrow as pa

    tables: list[Any] = []
    for file in files:
        try:
            mapped = pa.memory_map(str(file))
            try:
                tables.append(pa.ipc.open_file(mapped).read_all())
            except pa.ArrowInvalid:
                mapped.seek(0)
                tables.append(pa.ipc.open_stream(mapped).read_all())
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"expected an Arrow file, got {file}: {error}", hint="was it written completely?", path=str(file)) from error
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise DataError(f"expected shards of one schema in {path}, got: {error}", hint="save the dataset again", path=str(path)) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"expected JSON in {path}, got: {error}", hint="save the dataset again", path=str(path)) from error
    return found if isinstance(found, dict) else {}
