"""What stands in an option: numbers, or names out of a few, separated by commas."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TypeVar

from streamrl.errors import ConfigError

K = TypeVar("K", bound=StrEnum)


def numbers(option: str, text: str) -> tuple[int, ...]:
    """`256,2k` to (256, 2048), each once; raises ConfigError for anything else."""
    found: list[int] = []
    for part in filter(None, map(str.strip, text.split(","))):
        match = re.fullmatch(r"([0-9]{1,9})(k?)", part)
        if match is None:
            raise ConfigError(f"{option}: expected numbers like 256,2k, got {text!r}", option=option, got=text)
        found.append(int(match[1]) * (1024 if match[2] else 1))
    return tuple(dict.fromkeys(found))


def names(option: str, text: str, kind: type[K]) -> tuple[K, ...]:
    """Members of an enumeration by their values, each once; all of them for an empty text. Raises ConfigError for a name that is none."""
    found = list(filter(None, map(str.strip, text.split(","))))
    if wrong := [name for name in found if name not in set(kind)]:
        raise ConfigError(f"{option}: expected some of {', '.join(kind)}, got {wrong[0]!r}", option=option, got=wrong[0])
    return tuple(kind(name) for name in dict.fromkeys(found)) or tuple(kind)
