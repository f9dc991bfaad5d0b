"""What commands of bash itself do to variables; other programs change none (bash(1), SHELL BUILTIN COMMANDS)."""

from __future__ import annotations

import os.path
import re
from pathlib import Path

from streamrl.bridges.slime.bash.state import State
from streamrl.bridges.slime.bash.values import Field, Place, Unknown

_SUCCEED = frozenset({":", "true", "echo", "printf", "set", "shopt", "trap", "umask", "ulimit", "mkdir", "sleep", "alias", "hash", "wait"})
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NOWHERE = "unknown-folder-since-line-"
_READING = ("read", "mapfile", "readarray", "getopts", "let")


def apply(state: State, fields: list[Field], place: Place, unread: list[Unknown]) -> bool | None:
    """The command's effect on the state; its status: True for 0, None where it is not known.

    `unread` gets what may set names of its own, as `eval` does.
    """
    name = fields[0].value if fields else "true"
    arguments = fields[1:]
    if isinstance(name, Unknown):
        return None
    if name == "eval":
        unread.append(Unknown(f"what eval runs at {place} is not read", place, "write the assignments into the script"))
        state.foreign = unread[-1]
        return None
    if name in _READING:
        for one in arguments:
            if isinstance(one.value, str) and (found := _NAME.match(one.value)):
                state.forget(found[0], Unknown(f"{found[0]} is set by {name} at {place}", place), array=name in ("mapfile", "readarray"))
        return None
    if name == "printf" and len(arguments) > 1 and arguments[0].value == "-v" and isinstance(target := arguments[1].value, str):
        state.forget(target, Unknown(f"{target} is set by printf at {place}", place), array=False)
    elif name == "unset":
        for one in arguments:
            if isinstance(one.value, str):
                state.unset(one.value)
    elif name == "cd":
        _cd(state, arguments, place)
        return True
    elif name == "shift":
        count = arguments[0].value if arguments else "1"
        state.arguments = state.arguments[int(count) :] if isinstance(count, str) and re.fullmatch(r"\d{1,6}", count) else []
        return True
    elif name == "set" and arguments and arguments[0].value == "--":
        state.arguments = arguments[1:]
    elif name == "false":
        return False
    return True if name in _SUCCEED or name == "unset" else None


def _cd(state: State, arguments: list[Field], place: Place) -> None:
    where = [one.value for one in arguments if one.value != "--"]
    if len(where) == 1 and isinstance(where[0], str) and not where[0].startswith(("-", "~")):
        state.cwd = Path(os.path.normpath(state.cwd / where[0]))
        return
    state.cwd = nowhere(place)


def nowhere(place: Place) -> Path:
    """In place of a folder that is not known: relative names in it are of files that are not there, and so not mistaken for others."""
    return Path(f"/{_NOWHERE}{place.line}")


def is_nowhere(folder: Path) -> bool:
    """Whether it is, or lies in, such a folder."""
    return len(folder.parts) > 1 and folder.parts[1].startswith(_NOWHERE)
