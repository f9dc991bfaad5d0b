"""What is known of one flag of slime: how it is given, and what becomes of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Kind = Literal["switch", "whole", "number", "text", "wholes", "texts", "any"]
"""`switch`: no value. `any`: values that nobody reads."""
Fate = Literal["mapped", "approximated", "nothing", "refused"]
"""`nothing`: there is nothing to set, streamrl does it without being told or has no such part."""


class Flag(msgspec.Struct, frozen=True):
    """One flag."""

    name: str
    kind: Kind
    fate: Fate
    says: str
    """The difference where it is approximated, why there is nothing to set or why it is refused; else what it is."""
    keys: tuple[str, ...] = ()
    nearest: str = ""
    """What to do instead of a refused one."""
    default: Any = None
    """Of slime, or of Megatron below it; written where streamrl's own is another."""


def canonical(name: str) -> str:
    """As slime's parser takes it, with dashes: `custom_rm_path` -> `--custom-rm-path`."""
    return "--" + name.removeprefix("--").replace("_", "-")


def mapped(name: str, kind: Kind, *keys: str, says: str = "", default: Any = None) -> Flag:
    """It becomes the keys, as it is."""
    return Flag(name, kind, "mapped", says, keys, default=default)


def near(name: str, kind: Kind, *keys: str, says: str, default: Any = None) -> Flag:
    """It becomes the keys, with the difference that is said."""
    return Flag(name, kind, "approximated", says, keys, default=default)


def nothing(says: str, *names: str) -> tuple[Flag, ...]:
    """There is nothing to set for any of them."""
    return tuple(Flag(name, "any", "nothing", says) for name in names)


def refused(says: str, nearest: str, *names: str) -> tuple[Flag, ...]:
    """Each is refused."""
    return tuple(Flag(name, "any", "refused", says, nearest=nearest) for name in names)
