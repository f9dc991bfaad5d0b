"""Keys and values as TOML, with where each is from behind it (toml.io, v1.0.0)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from streamrl.config.tree import Config


class Entry(NamedTuple):
    """A value, and the comment behind it."""

    value: Any
    comment: str


def document(entries: Mapping[str, Entry], tables: Mapping[str, Sequence[Mapping[str, Entry]]], head: Sequence[str]) -> str:
    """A TOML file.

    Args:
        entries: by dotted key.
        tables: by the dotted name of an array of tables, such as `evaluation.sets`, what each of them holds.
        head: lines of the comment that it begins with.
    """
    lines = [f"# {_one_line(line)}".rstrip() for line in head]
    order = {name: place for place, name in enumerate(field.encode_name for field in msgspec.structs.fields(Config))}
    sections = {key.rpartition(".")[0] for key in entries} | set(tables)
    for section in sorted(sections, key=lambda one: (order.get(one.partition(".")[0], len(order)), one.count("."), one)):
        own = {key.rpartition(".")[2]: entry for key, entry in entries.items() if key.rpartition(".")[0] == section}
        if own:
            lines += ["", f"[{section}]", *_lines(own)]
        for table in tables.get(section, ()):
            lines += ["", f"[[{section}]]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(entries: Mapping[str, Entry]) -> list[str]:
    texts = [(f"{_key(key)} = {value_of(entry.value)}", entry.comment) for key, entry in entries.items()]
    width = min(44, max(len(text) for text, _ in texts))
    return [f"{text:<{width}}  # {_one_line(comment)}" if comment else text for text, comment in texts]


def value_of(value: Any) -> str:
    """A TOML value of a bool, number, text, list or table."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(key))} = {value_of(one)}" for key, one in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(value_of, value)) + "]"
    return str(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else value_of(name)


def _one_line(text: str) -> str:
    """A comment holds no ends of lines and no control characters."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)
