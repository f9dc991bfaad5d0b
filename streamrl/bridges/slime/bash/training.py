"""The training command of a script: which of its commands it is, and what is known of it."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.bridges.slime.bash.values import Field, Place, Unknown

_ENTRY = re.compile(r"(?:.*/)?train\w*\.py")
_SAYING = ("echo", "printf", ":")
"""Commands that only show their words."""
_PYTHON = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun)")


@dataclass(frozen=True)
class Training:
    """The words behind `train.py`, and how they came about."""

    entry: str
    words: tuple[Field, ...]
    place: Place
    cwd: Path
    uncertain: Unknown | None
    """What decides whether the command is run at all; None: it is."""
    dangling: Place | None = None
    """A command behind it that begins with an array or a flag: a `\\` before it is missing."""


@dataclass(frozen=True)
class Script:
    """What is known of a script."""

    trainings: tuple[Training, ...]
    defaults: Mapping[str, tuple[str, Place]]
    """Variables that are taken to be unset, what the script has instead, and where."""
    unread: tuple[Unknown, ...]
    """What was passed over and may have set variables."""
    ended: Place | None
    """An `exit` that it came to."""


def training_of(fields: Sequence[Field], place: Place, cwd: Path, uncertain: Unknown | None) -> Training | None:
    """What stands behind `train.py` in a command that hands it to Python, or runs it itself; None for other commands."""
    if fields and fields[0].value in _SAYING:
        return None
    for index, one in enumerate(fields):
        if not isinstance(one.value, str) or not _ENTRY.fullmatch(one.value):
            continue
        if not index or any(isinstance(other.value, str) and _PYTHON.fullmatch(other.value) for other in fields[:index]):
            return Training(os.path.basename(one.value), tuple(fields[index + 1 :]), place, cwd, uncertain)
    return None
