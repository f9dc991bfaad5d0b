"""From the fields of a request to how its tokens are drawn: the one place where the APIs' words meet `streamrl.schemas.tasks.Sampling`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.gateway.errors import ApiError, refused
from streamrl.schemas.tasks import Sampling

_FIELD = re.compile(r"\$\.([a-z_]+)")
NAMES: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    **{name: name for name in Sampling.__struct_fields__ if name != "max_new_tokens"},
}
"""Field of `Sampling` by field of a request."""
MAX_TOKEN = 2**31 - 1
_ALWAYS = frozenset({"max_new_tokens", "temperature", "stop", "stop_token_ids", "ignore_eos"})
"""What every engine can draw by."""


def sampling_of(given: Mapping[str, Any], base: Sampling, drawable: Callable[[Sampling], None], where: str = "") -> Sampling:
    """How a call's tokens are drawn.

    Args:
        given: its fields of sampling; None counts as left out.
        base: of the task.
        drawable: raises ConfigError for what the run's engines cannot draw by, or its trainer not train.
        where: what stands before a field's name in errors.

    Raises:
        ApiError: a field that the engines do not have, or a value that they cannot draw by.
    """
    said: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in NAMES:
            raise _unknown(where + name, value)
        said[NAMES[name]] = [value] if name == "stop" and isinstance(value, str) else value
    try:
        # Checked by type too: JSON has given these.
        sampling = msgspec.convert({**msgspec.to_builtins(base), **said}, Sampling, str_keys=True)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        raise refused(
            f"expected values that tokens can be drawn by: {error}", param=where + _asked(given, found[1] if found else "")
        ) from error
    except SchemaError as error:
        field = str(error.values.get("key", "")).rpartition(".")[2]
        raise refused(f"expected values that tokens can be drawn by: {error.message}", param=where + _asked(given, field)) from error
    if not all(0 <= token <= MAX_TOKEN for token in sampling.stop_token_ids):
        raise refused(f"expected ids of tokens, from 0 to {MAX_TOKEN}", param=where + "stop_token_ids")
    if not 0 < sampling.temperature < 1e6:
        raise refused(
            f"expected a temperature above 0, got {sampling.temperature:g}",
            hint="a greedy token has no log-prob to train on; leave temperature out for the task's own",
            code="unsupported_value",  # by which clients know that they may leave it out
            param=where + "temperature",
        )
    if said.keys() - _ALWAYS:
        try:
            drawable(sampling)
        except ConfigError as error:
            field = str(error.values.get("key", "")).rpartition(".")[2]
            message = f"expected sampling that this run can do: {error.message}"
            raise refused(message, hint=error.hint, code="unsupported_parameter", param=where + _asked(given, field)) from error
    return sampling


def _asked(given: Mapping[str, Any], field: str) -> str:
    """What the request calls a field of `Sampling`."""
    return next((name for name, value in given.items() if value is not None and NAMES.get(name) == field), field)


def within(sampling: Sampling, room: int) -> Sampling:
    """The same, at most up to where the model's longest sequence ends."""
    return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))


def _unknown(name: str, value: Any) -> ApiError:
    shown = repr(value)
    return refused(
        f"expected no field {name}, which would change how tokens are drawn in a way that the engines do not know, got {shown[:80]}",
        hint="leave it out",
        code="unsupported_parameter",
        param=name,
    )
