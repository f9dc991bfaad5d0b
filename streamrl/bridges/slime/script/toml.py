"""A configuration as TOML, with where each value is from behind it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from streamrl.bridges.toml import pair
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
    texts = [(pair(key, entry.value), entry.comment) for key, entry in entries.items()]
    width = min(44, max(len(text) for text, _ in texts))
    return [f"{text:<{width}}  # {_one_line(comment)}" if comment else text for text, comment in texts]


def _one_line(text: str) -> str:
    """A comment holds no ends of lines and no control characters."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)
