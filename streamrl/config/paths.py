"""Paths inside the configuration: which fields hold them, and what they are relative to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.config.bridges import bridges, split
from streamrl.config.loss import OF_LOGITS
from streamrl.errors import ConfigError

DATASETS = ("data.train", "data.heldout")
"""`path` or `path@[a:b]`."""
DIRECTORIES = ("model.path", "data.images_folder", "loss.kl.reference", "loss.critic.path", "loss.distillation.teacher")
FILES = ("bus.password_file", "bus.token_file", "bus.credentials_file", "bus.ca_file")
EXECUTABLES = ("engine.sglang.python", "producer.python")
"""A name without a slash is looked up in PATH. Links are kept: they are what makes an interpreter that of its environment."""
FUNCTIONS = (
    *(key for bridge in bridges() for key in bridge.functions),  # before the keys that they stand at, for messages
    "producer.function",
    "reward.kind",
    "filters.function",
    "data.curriculum",
    "loss.advantage",
    "loss.policy",
    OF_LOGITS,
)
"""`file.py:name` has a path; `pkg.mod:name`, `pkg.mod.name` and built-in names have none."""

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


class DatasetPath(NamedTuple):
    """A dataset file and the rows of it that are used, as in `rows[start:stop]`."""

    path: str
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return self.path
        start, stop = ("" if edge is None else str(edge) for edge in (self.start, self.stop))
        return f"{self.path}@[{start}:{stop}]"


def parse_dataset(text: str) -> DatasetPath:
    """Read `path` or `path@[a:b]`, where a and b are row numbers as in a Python slice; raises ConfigError on another suffix."""
    match = _SLICE.fullmatch(text)
    if match is not None:
        start, stop = (int(edge) if edge not in ("", "-") else None for edge in (match["start"], match["stop"]))
        return DatasetPath(match["path"], start, stop)
    if re.search(r"@\[.*$", text):
        raise ConfigError(
            f"expected a slice such as rows.jsonl@[0:100] or rows.jsonl@[-72:], got {text!r}",
            hint="write whole row numbers, from the start (0, 1, ...) or from the end (-1, -2, ...)",
            got=text,
        )
    return DatasetPath(text)


def resolve(tree: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """A copy of a raw configuration table with its relative paths made absolute against `base`. Leaves wrong types alone."""
    resolved = _copy(tree)
    _resolve_sets(resolved, base)
    for key in (*DATASETS, *DIRECTORIES, *FILES, *EXECUTABLES, *FUNCTIONS):
        *sections, field = key.split(".")
        table: Any = resolved
        for section in sections:
            table = table.get(section) if isinstance(table, dict) else None
        if not isinstance(table, dict) or not isinstance(table.get(field), str) or not table[field]:
            continue
        text: str = table[field]
        if key in DATASETS:
            table[field] = _dataset(text, base)
        elif key in EXECUTABLES:
            if "/" in text:
                table[field] = os.path.abspath(base / Path(text).expanduser())
        elif key in FUNCTIONS:
            table[field] = _function(text, base)
        else:
            table[field] = _absolute(text, base)
    for section, _, key in (key.partition(".") for bridge in bridges() for key in bridge.function_lists):
        if isinstance(table := resolved.get(section), dict) and isinstance(named := table.get(key), list):
            table[key] = [_function(one, base) if isinstance(one, str) and one else one for one in named]
    data = resolved.get("data")
    if isinstance(data, dict) and isinstance(data.get("sources"), list | tuple):
        data["sources"] = [_source(one, base) for one in data["sources"]]
    return resolved


def _source(table: Any, base: Path) -> Any:
    if not isinstance(table, Mapping) or not isinstance(text := table.get("train"), str) or not text:
        return table
    return {**table, "train": _dataset(text, base)}


def _resolve_sets(tree: dict[str, Any], base: Path) -> None:
    """The paths in `[[evaluation.sets]]`: of rows, of a producer, of a reward."""
    evaluation = tree.get("evaluation")
    sets = evaluation.get("sets") if isinstance(evaluation, dict) else None
    for one in sets if isinstance(sets, list) else ():
        reward = one.get("reward") if isinstance(one, dict) else None
        for table, field, absolute in ((one, "path", _dataset), (one, "function", _function), (reward, "kind", _function)):
            if isinstance(table, dict) and isinstance(table.get(field), str) and table[field]:
                table[field] = absolute(table[field], base)


def _dataset(text: str, base: Path) -> str:
    dataset = parse_dataset(text)
    path, named = _absolute(dataset.path, base), base / Path(dataset.path).expanduser()
    if Path(path).suffix != named.suffix:  # a link to a file without the name that says its format, as in the Hub's cache
        path = os.path.abspath(named)
    return str(dataset._replace(path=path))


def _function(text: str, base: Path) -> str:
    prefix, named = split(text)
    file, name = _file_and_name(named)
    return f"{prefix}{_absolute(file, base)}{name}" if file else text


def without_folder(key: str, value: str) -> str:
    """What the key's value names, without where it lies: `file.py:name` of `folder/file.py:name`."""
    prefix, named = split(value) if key in FUNCTIONS else ("", "")
    file, name = _file_and_name(named)
    return f"{prefix}{Path(file).name}{name}" if file else value


def file_of(function: str) -> str:
    """The file that a function's reference names; empty: none."""
    return _file_and_name(split(function)[1])[0]


def _file_and_name(function: str) -> tuple[str, str]:
    """A file and `:name`, which a taskset has not; the file is empty where the function is not in one that is named."""
    file, colon, name = function.rpartition(":")
    if not colon and function.endswith(".py"):
        return function, ""
    return (file, colon + name) if colon and file.endswith(".py") else ("", function)


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) for name, value in tree.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _copy(value)
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value


def _absolute(text: str, base: Path) -> str:
    return str((base / Path(text).expanduser()).resolve())
