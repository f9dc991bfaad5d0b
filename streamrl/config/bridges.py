"""A bridge to another system is found by a reference's prefix. `streamrl/bridges/table.py` lists them; each is imported when needed."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from streamrl.config.tree import Config


class Bridge(msgspec.Struct, frozen=True, kw_only=True):
    """A bridge to another system. Functions are named as `module:name`; an empty name means that the bridge has none."""

    prefixes: tuple[str, ...]
    """Texts before the names of its functions or environments in a reference, with the colon."""
    adapted: str = ""
    """(reference, *, key, base) -> a function with streamrl's signature that calls the user's, which has the other system's."""
    check: str = ""
    """(name, section `producer`) -> None; raises ConfigError for an environment that is not there."""
    producer: str = ""
    """(name) -> the function that rolls tasks out in the environment."""
    play: str = ""
    """async (worker) -> None, runs a producer worker for which the other system makes the rollouts, of its own tasks."""
    write_rows: str = ""
    """async (config, model directory, note) -> None, writes the other system's tasks to `data.train` as rows."""
    loss: str = ""
    """(section `loss`) -> a `WholeLoss` of streamrl.trainers.torch.update, of the function that `LossConfig.of_logits` names."""
    options: str = ""
    """(config, model directory) -> values by name that the user's functions are given besides their options."""
    section: str = ""
    """Section of the configuration; its `custom_config` holds values of the user's own."""
    lowered: str = ""
    """(raw table, where) -> the table with the functions of the section at streamrl's own keys, too."""
    raised: str = ""
    """(raw table) -> the table without what `lowered` has put there, so that the section can be changed."""
    check_function: str = ""
    """(reference, *, key) -> None; raises ConfigError unless the function at a key of the section has the signature for it."""
    functions: tuple[str, ...] = ()
    """Keys of the section that name a function."""
    function_lists: tuple[str, ...] = ()
    """Keys of the section that name several functions."""
    beside: tuple[str, ...] = ()
    """Keys of either kind whose functions have no key of streamrl's own."""
    judging: tuple[str, ...] = ()
    """Keys among these whose functions judge the rollouts of any producer."""
    of_producers: tuple[str, ...] = ()
    """Keys of either kind whose functions only producers run."""
    of_trainer: tuple[str, ...] = ()
    """Keys of either kind whose functions the trainer runs."""
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


def brings_tasks(reference: str) -> bool:
    """Tell whether a producer's tasks are another system's, and are written to `data.train` when the run starts."""
    bridge = bridge_of(reference)
    return bridge is not None and bool(bridge.write_rows)


def sections() -> list[str]:
    """The sections of the configuration that are bridges'."""
    return [one.section for one in bridges() if one.section]


def section_of(key: str) -> Bridge | None:
    """The bridge whose section a key is in."""
    return next((one for one in bridges() if one.section and key.startswith(f"{one.section}.")), None)


def sections_of(references: Iterable[str]) -> list[str]:
    """The sections of the bridges that these references name, each once."""
    found = (bridge_of(reference) for reference in references)
    return sorted({bridge.section for bridge in found if bridge is not None and bridge.section})


def lowered(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Put the functions that bridges' sections of a raw table name at streamrl's own keys, too. A second time it changes nothing.

    Raises:
        ConfigError: such a key names something else already, or two functions are for one key.
    """
    found = dict(tree)
    for one in bridges():
        if one.lowered and one.section in found:
            found = function_of(one.lowered)(found, where)
    return found


def raised(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Remove from a table what `lowered` has put there, so that bridges' sections can be changed."""
    found = dict(tree)
    for one in bridges():
        if one.raised:
            found = function_of(one.raised)(found)
    return found


def with_options(config: Config, model_dir: str | Path, reference: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that user code in a child is given. A function written for another system also gets what that would give it."""
    bridge = bridge_of(reference)
    return {**options, **function_of(bridge.options)(config, model_dir)} if bridge and bridge.options else options


def beside(config: Config) -> dict[str, str]:
    """Return by key the functions of bridges' sections that have no key of streamrl's own and run beside one that has."""
    found: dict[str, str] = {}
    for key in (key for bridge in bridges() for key in bridge.beside):
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        found |= {key: value} if isinstance(value, str) else {f"{key}[{index}]": one for index, one in enumerate(value)}
    return {key: reference for key, reference in found.items() if reference}


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
