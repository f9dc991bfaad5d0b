"""The files of a run that a trainer of retrain's becomes: its TOML, its rows, and the Python file of its producer."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from streamrl.bridges.toml import pair
from streamrl.config.plugins import resolve
from streamrl.errors import ConfigError

PRODUCER = '''"""The producer of this run, written by streamrl.bridges.retrain."""

from streamrl.bridges.retrain import create_retrain_bridge

bridge = create_retrain_bridge(
{arguments}
)
'''


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables; raises ConfigError where one is a table and a value."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise ConfigError(f"expected {section} to be a table for {key}, got {table!r}", hint="name either", key=key)
        if name in table:
            raise ConfigError(f"expected {key} to be a table, as other keys have it, got {value!r}", hint="name either", key=key)
        table[name] = value
    return tree


def toml(tree: Mapping[str, Any]) -> str:
    """Tables of plain values as TOML, a section each; raises ConfigError for a value that TOML does not have."""
    lines: list[str] = []
    for section, table in tree.items():
        lines += [f"[{section}]", *(pair(key, value) for key, value in table.items()), ""]
    text = "\n".join(lines)
    if tomllib.loads(text) != json.loads(json.dumps(tree)):
        raise ConfigError(
            "expected plain numbers, texts, lists and tables as hyperparameters", hint="other values cannot be kept in a file"
        )
    return text


def producer(arguments: Mapping[str, Any]) -> str:
    """The Python file that makes the bridge; raises ConfigError for an argument that cannot be written in one."""
    for name, value in arguments.items():
        try:
            same = ast.literal_eval(repr(value)) == value
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            same = False
        if not same:
            raise ConfigError(
                f"expected {name} to be plain numbers, texts, lists and tables, got {value!r}"[:300],
                hint="the producer's process makes its parts itself, from a file: make other objects in the function that it names",
                key=name,
            )
    return PRODUCER.format(arguments="\n".join(f"    {name}={value!r}," for name, value in arguments.items()))


def reference(given: Any, key: str) -> str:
    """How another process finds a class or a function: `/path/file.py:Name` or `pkg.mod:Name`.

    Raises:
        ConfigError: an object in its place, or what has no name outside of this process.
    """
    if isinstance(given, str):
        place, colon, name = given.partition(":")
        named = f"{Path(place).expanduser().resolve()}:{name}" if colon and place.endswith(".py") else given
        resolve(named, what=key.replace("_", " "), key=key)
        return named
    name = getattr(given, "__qualname__", "")
    if not (inspect.isclass(given) or inspect.isroutine(given)) or not name or "<" in name:
        what = name or f"an object of the class {type(given).__name__}"
        raise ConfigError(
            f"expected {key} to be a class or a function of a module, or its name as file.py:Name, got {what}",
            hint="hundreds of episodes run at once, in processes of their own, and each makes what it needs: name what makes it",
            key=key,
        )
    module = sys.modules[given.__module__]
    file = getattr(module, "__file__", None)
    if "." in module.__name__ or not file or _installed(module.__name__, file):
        return f"{module.__name__}:{name}"
    return f"{Path(file).resolve()}:{name}"


def _installed(name: str, file: str) -> bool:
    """Whether every process finds a module by its name."""
    return name != "__main__" and "site-packages" in Path(file).parts


def write_rows(path: Path, prompts: Iterable[Any]) -> dict[str, str]:
    """Rows of texts, or of tables with `prompt` and perhaps `label` and `metadata`; the keys of `data` that they need.

    Raises:
        ConfigError: no row, a row without a prompt, or a label in some rows only.
    """
    rows: list[dict[str, Any]] = []
    for number, given in enumerate(prompts):
        row: Any = {"prompt": given} if isinstance(given, str) else given
        if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str | list) or not row["prompt"]:
            raise ConfigError(
                f"expected prompt {number} to be a text, or a table with one as `prompt`, got {given!r}"[:300], hint="correct the prompts"
            )
        rows.append(dict(row))
    if not rows:
        raise ConfigError("expected at least one prompt, got none", hint="there are no prompts but yours")
    labels = [number for number, row in enumerate(rows) if row.get("label") is not None]
    if labels and len(labels) < len(rows):
        missing = next(number for number in range(len(rows)) if number not in set(labels))
        raise ConfigError(f"expected a label in every row or in none, prompt {missing} has none", hint="give all of them one")
    try:
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expected prompts of plain numbers, texts, lists and tables: {error}", hint="correct the prompts") from error
    path.write_text(text, encoding="utf-8")
    keys = {"data.train": str(path.resolve()), "data.label_key": "label" if labels else ""}
    return keys | ({"data.metadata_key": "metadata"} if all("metadata" in row for row in rows) else {})
