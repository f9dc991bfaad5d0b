"""Bridges to other systems: what `streamrl/bridges/table.py` lists, by the prefix of a reference. Each is loaded when it is named."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from streamrl.errors import ConfigError


class Bridge(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table. A function of the bridge is `module:name`, and is empty where the bridge has none."""

    prefixes: tuple[str, ...]
    """What stands before the names of its functions or environments in a reference, with the colon."""
    adapted: str = ""
    """(reference, *, key, base) -> a function of our form that calls the user's, which is of the other system's form."""
    check: str = ""
    """(name, section `producer`) -> None; raises ConfigError for an environment that is not there."""
    producer: str = ""
    """(name) -> the function that rolls tasks out in the environment."""
    play: str = ""
    """async (worker) -> None, a producer worker whose rollouts the other system makes, of tasks that it brings."""
    write_rows: str = ""
    """async (config, model directory, note) -> None, writes the rows of tasks that it brings to `data.train`."""
    check_config: str = ""
    """(config) -> None; raises ConfigError for keys that do not go with a producer of this bridge."""


@cache
def bridges() -> tuple[Bridge, ...]:
    """The table."""
    table: Any = importlib.import_module("streamrl.bridges.table")
    return table.BRIDGES


def bridge_of(reference: str) -> Bridge | None:
    """The bridge whose prefix a reference has."""
    prefix, _ = split(reference)
    return next((one for one in bridges() if prefix in one.prefixes), None)


def function_of(name: str) -> Any:
    """The function that a row of the table names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def split(reference: str) -> tuple[str, str]:
    """A prefix of some bridge and what stands behind it, or an empty text and the reference."""
    prefix, colon, name = reference.partition(":")
    known = bool(colon) and any(prefix + colon in one.prefixes for one in bridges())
    return (prefix + colon, name) if known else ("", reference)


def is_adapted(reference: str) -> bool:
    """Whether a reference names a function of another system's form."""
    bridge = bridge_of(reference)
    return bridge is not None and bool(bridge.adapted)


def brings_tasks(reference: str) -> bool:
    """Whether a producer's tasks are another system's, and are written to `data.train` when the run starts."""
    bridge = bridge_of(reference)
    return bridge is not None and bool(bridge.write_rows)


def check_options(options: Mapping[str, Any], known: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raise ConfigError unless `producer.options` holds nothing but `known` names, each with a value of its type."""
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"expected an option of this environment, got {name!r}", hint=hint, key="producer.options")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise ConfigError(
                f"producer.options.{name}: expected {_called(known[name])}, got {value!r}", hint="correct it", key="producer.options"
            )


def _called(kinds: type | tuple[type, ...]) -> str:
    several: Sequence[type] = kinds if isinstance(kinds, tuple) else (kinds,)
    return " or ".join({dict: "a table", str: "a text", int: "a whole number"}.get(kind, kind.__name__) for kind in several)
