"""Environments of other libraries, as `producer.function` names them: `openenv:URL`, `skyrl_gym:NAME`, `verifiers:NAME`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from streamrl.config.slime import GROUP, REWARDS, ROLLOUT, SLIME
from streamrl.errors import ConfigError

VERIFIERS = "verifiers:"
ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "openenv": "streamrl.producers.openenv",
        "skyrl_gym": "streamrl.producers.skyrl_gym",
        "verifiers": "streamrl.producers.verifiers.adapter",
    }
)
"""Module of each: `check(name, producer)`, with the section `producer`, and `producer(name)`."""


def split(reference: str) -> tuple[str, str]:
    """`skyrl_gym:` or `slime:` and what stands behind it, or an empty text and the reference."""
    prefix, colon, name = reference.partition(":")
    known = prefix in ADAPTERS or prefix + colon in (SLIME, GROUP, ROLLOUT, REWARDS)
    return (prefix + colon, name) if colon and known else ("", reference)


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
