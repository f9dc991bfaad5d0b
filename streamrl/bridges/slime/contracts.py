"""Whether a function is of a hook's form: looked at, and not called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from streamrl.bridges.slime import modules
from streamrl.bridges.slime.args import taken
from streamrl.bridges.slime.known import HOOKS
from streamrl.bridges.slime.section import GROUP, PLACES
from streamrl.config.plugins import resolve
from streamrl.errors import ConfigError

_SEAMS = {(f"{one.section}.{one.key}", one.prefix): one.flag for one in PLACES if one.prefix}
_SEAMS["reward.kind", GROUP] = "custom_rm_path"


class Asked(msgspec.Struct, frozen=True):
    """What `streamrl check-hook` tries."""

    flag: str
    """Which hook."""
    reference: str
    """The function."""
    group: bool = False
    """`group_rm`."""
    args: dict[str, Any] = {}
    """Values of the user's own in `args`."""
    options: dict[str, Any] = {}
    """`reward.options`."""
    reward_key: str = ""
    metadata: dict[str, Any] = {}
    """Of the row."""


def hook_of(key: str, prefix: str) -> str:
    """Which of slime's hooks stands at a key of ours behind a prefix; raises ConfigError where none does."""
    name = key.rpartition("].")[2]  # of a set of problems, as in training
    name = "producer.function" if name == "function" else name
    if (found := _SEAMS.get((name, prefix))) is None:
        known = ", ".join(f"{one} of {at}" for at, one in _SEAMS)
        raise ConfigError(f"{key} does not take {prefix}: expected one of {known}", hint="see docs/slime-hooks.md", key=key)
    return found


def check_hook(flag: str, reference: str, *, key: str, base: Path | None = None) -> Callable[..., Any]:
    """The function that `reference` names; raises ConfigError unless it is there and can be called as slime calls this hook."""
    hook = HOOKS[flag]
    modules.provide()
    found: Any = resolve(reference, what=f"function for slime's {flag}", key=key, base=base)
    wrong = _misformed(flag, found)
    if wrong:
        raise ConfigError(f"{key} = {reference!r}: {wrong}", hint=f"slime calls it as `{hook.signature}`", key=key)
    return found


def _misformed(flag: str, found: Any) -> str:
    """What is wrong with its form; empty: nothing."""
    hook = HOOKS[flag]
    if not callable(found):
        return f"expected a function, got a {type(found).__name__}"
    if inspect.isclass(found):
        return f"expected a function, got the class {found.__name__}"
    awaits = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None))  # noqa: B004
    if hook.form == "async" and not awaits:
        return "expected `async def`, got a plain function"
    if hook.form == "plain" and awaits:
        return "expected a plain function, got `async def`"
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # written in C: it does not say
        return ""
    try:
        signature.bind(*hook.takes, **dict.fromkeys((*hook.named, *taken(found, hook.optional))))
    except TypeError as error:
        given = ", ".join((*hook.takes, *(f"{one}=" for one in hook.named)))
        return f"it takes {signature}, which does not go with a call of {given}: {error}"
    return ""


def check_section(reference: str, *, key: str) -> None:
    """Raise ConfigError unless the function at a key of the section `slime` has its form."""
    check_hook(key.removeprefix("slime.").partition("[")[0], reference, key=key)
