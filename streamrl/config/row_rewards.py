"""The reward that a row names for its own tasks: a kind, or a table of kind and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.config.loss import is_function
from streamrl.config.reward_kinds import BOXED, NOT_OF_ROWS, options_of
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import RewardSpec

_KEY = "data.reward_key"


def row_reward(said: object, shared: Mapping[str, Mapping[str, Any]]) -> RewardSpec:
    """What a row says, checked with `shared`, which is `data.reward_options`; the options given back are the row's alone.

    Raises:
        ConfigError: it is no built-in kind, or not with these options; who calls says which row.
    """
    table = {"kind": said} if isinstance(said, str) else said
    if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str) or set(table) - {"kind", "options"}:
        raise _wrong(f"expected the name of a reward, or a table of kind and options, got {said!r:.200}")
    given = table.get("options") or {}
    if not isinstance(given, Mapping):
        raise _wrong(f"expected a table of options, got {given!r:.200}")
    # Parquet has every field in every row.
    spec = RewardSpec(str(table["kind"]), {str(name): value for name, value in given.items() if value is not None})
    if is_function(spec.kind):
        raise _wrong(f"a row names a built-in reward, got {spec.kind!r}", "user code is named in reward.kind alone")
    if forbidden := sorted(NOT_OF_ROWS & set(spec.options)):
        hint = "set them in data.reward_options"
        raise _wrong(f"a row may not say where its texts go, or how programs are kept apart, got {forbidden}", hint)
    options_of(spec.kind, whole(spec, shared), key="its reward")
    return spec


def whole(spec: RewardSpec, shared: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Its options over those that all rows of its kind share."""
    return {**shared.get(spec.kind.removeprefix(BOXED), {}), **spec.options}


def _wrong(message: str, hint: str = "docs/rewards.md says what a row may name") -> ConfigError:
    return ConfigError(message, hint=hint, key=_KEY)
