"""Keys and values as TOML (toml.io, v1.0.0)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from streamrl.errors import ConfigError

_BARE = re.compile(r"[A-Za-z0-9_-]+")
"""A key that TOML takes without quotes."""


def pair(key: str, value: Any) -> str:
    """`key = value`; raises ConfigError as `toml_value`."""
    return f"{key if _BARE.fullmatch(key) else toml_value(key)} = {toml_value(value)}"


def toml_value(value: Any) -> str:
    """A value in one line; raises ConfigError unless it is a bool, a finite number, a text, or a list or a table of such."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(pair(str(key), one) for key, one in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        # A text of JSON is one of TOML, but for a character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise ConfigError(f"expected a finite number, a text, a list or a table, got {value!r}", hint="a file of a run holds no other values")
