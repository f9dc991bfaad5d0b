"""The page of all configuration keys, from the structs: names, types and defaults as msgspec has them, meanings from the source."""

from __future__ import annotations

import inspect
import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from streamrl.config.registry import ESTIMATORS, POLICY_LOSSES
from streamrl.config.schema import field_meanings
from streamrl.config.tree import Config

HEAD = """# Configuration

Made from `streamrl/config/` by `make docs`; do not edit it.

A run is one TOML file: a table for each section below, all keys optional but `data.train`. `--set section.key=value` puts a value over the
file's, as in `streamrl up my.toml --set tasks.max_staleness=2 --set data.train=rows.jsonl`; strings need no quotes there, and
a table is put over the file's key by key (`{}` empties it). An unknown key, a value of another type and sections that contradict each other
are refused before anything starts, with the nearest known key as a hint.
Paths in the file are relative to the file, those in `--set` and `run.dir` to the working directory.

Names end in their unit: `_s` are seconds, `_bytes` bytes, `_versions` versions (batches trained). A run keeps its whole configuration,
defaults included, as `runs/<name>/config.json`. Resuming it with another value of a key that decides what is learned is refused.
"""
_NAMED = {
    "loss.advantage": " \\| ".join(f"`{name}`" for name in ESTIMATORS) + " or a function",
    "loss.policy": " \\| ".join(f"`{name}`" for name in POLICY_LOSSES) + " or a function",
}
"""Keys whose values are names of the registry."""
_NAMES = {str: "string", int: "integer", float: "number", bool: "true / false"}


def configuration_page() -> str:
    """The whole page."""
    found = sections(Config())
    index = ", ".join(f"[{name}](#{re.sub(r'[^a-z_]', '', name)})" for name, _ in found)
    return "\n".join([HEAD, f"Sections: {index}.\n", *(_section(name, values) for name, values in found)]).rstrip() + "\n"


def sections(tree: msgspec.Struct, prefix: str = "") -> list[tuple[str, msgspec.Struct]]:
    """Dotted name and default values of every section, each before those inside it."""
    found: list[tuple[str, msgspec.Struct]] = []
    for field in msgspec.structs.fields(tree):
        value = getattr(tree, field.name)
        name = prefix + field.encode_name
        if (table := _table_of(field.type)) is not None:
            found += [(f"{name}[]", table()), *sections(table(), f"{name}[].")]
        if isinstance(value, msgspec.Struct):
            found += [(name, value), *sections(value, name + ".")]
    return found


def _section(name: str, values: msgspec.Struct) -> str:
    meanings = field_meanings(type(values))
    about = " ".join((inspect.getdoc(values) or "").split())
    lines = [f"## {name}", "", _cell(about), "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(values):
        default = getattr(values, field.name)
        if not isinstance(default, msgspec.Struct):
            cells = (_NAMED.get(f"{name}.{field.encode_name}") or _type(field.type), f"`{_toml(default)}`", meanings.get(field.name, ""))
            lines.append(f"| `{name}.{field.encode_name}` | {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join([*lines, ""])


def _table_of(kind: Any) -> Any:
    """The struct that a list of tables holds, such as `[[loss.correction.reject]]`; None for any other type."""
    inside = get_args(kind)[0] if get_origin(kind) is tuple else None
    return inside if isinstance(inside, type) and issubclass(inside, msgspec.Struct) else None


def _type(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{_type(arguments[0])}, {' and '.join(_bounds(arguments[1]))}"
    if origin is Literal:
        return " \\| ".join(f"`{_toml(value)}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in arguments if part is not NoneType)
    if _table_of(kind) is not None:
        return "list of tables"
    if origin is tuple and get_origin(arguments[0]) is tuple:
        return f"list of lists ({'; '.join(_type(part) for part in get_args(arguments[0]))})"
    if origin in (tuple, list):
        kind, *bounds = _type(arguments[0]).split(",")
        return ", each".join([f"list of {kind}s", *bounds])
    if origin is dict:
        return "table"
    return _NAMES[kind]


def _bounds(meta: msgspec.Meta) -> list[str]:
    found = {"at least": meta.ge, "above": meta.gt, "at most": meta.le, "below": meta.lt}
    return [f"{word} {_toml(bound)}" for word, bound in found.items() if bound is not None]


def _toml(value: Any) -> str:
    """A value as it stands in a TOML file."""
    if value is None:
        return "as elsewhere"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_toml(one) for one in value)}]"
    if isinstance(value, dict):
        return "{}" if not value else "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    return f"{value:_}" if isinstance(value, int) and value >= 1_000_000 else str(value)


def _cell(text: str) -> str:
    """Text for a cell of a table: a bare bar would end it."""
    return re.sub(r"(?<!\\)\|", r"\\|", text)
