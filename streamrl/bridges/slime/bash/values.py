"""What a word of a script comes to: text, or something that only running the script would tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """A line of a file, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that is not in the text."""

    why: str
    """A clause with its subject, such as `WANDB_KEY is not set in the script`."""
    place: Place
    hint: str = ""


Value = str | Unknown


class Field(NamedTuple):
    """One word of a command, or an element of an array."""

    value: Value
    place: Place
    raw: str
    """As the script has it."""
    many: bool = False
    """Of an unknown value: it may stand for any number of words."""
