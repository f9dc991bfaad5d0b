"""The process of `streamrl check-hook`: a hook is loaded, looked at and called, apart from the verb, which says how that ended."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from streamrl.bridges.slime.contracts import Asked, check_hook
from streamrl.bridges.slime.known import HOOKS, REFUSED
from streamrl.errors import ConfigError, StreamRLError
from streamrl.runtime.apart import TAIL_BYTES, begin, run_apart, say

_OURS = str(Path(__file__).parents[2])
_PYTHON = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = f"{os.sep}site-packages{os.sep}"


class Said(msgspec.Struct, frozen=True):
    """Of the process: that it calls the hook now, or what came of it."""

    calls: bool = False
    gave: tuple[str, ...] = ()
    message: str = ""
    hint: str = ""


def flag_of(name: str) -> str:
    """A hook's name from what a user writes for it, such as `--custom-rm-path`.

    Raises:
        ConfigError: it has no place here, or slime has no such hook.
    """
    flag = name.removeprefix("slime.").lstrip("-").replace("-", "_")
    if flag in REFUSED:
        reason, nearest = REFUSED[flag]
        raise ConfigError(f"slime's {flag} has no place here: {reason}", hint=nearest, key=flag)
    if flag not in HOOKS:
        raise ConfigError(f"expected one of slime's hooks, got {name!r}", hint=f"there are {', '.join(HOOKS)}", key=flag)
    return flag


async def try_hook(asked: Asked, *, limit_s: float, surroundings: Mapping[str, str]) -> tuple[str, ...]:
    """What the hook gave in its trial, in lines; raises ConfigError for what is wrong with it, in words."""
    ended = await run_apart("streamrl.bridges.slime.check_hook", msgspec.json.encode(asked).decode(), surroundings, limit_s)
    said = [msgspec.json.decode(line, type=Said) for line in ended.lines]
    last = said[-1] if said else Said()
    named = f"{asked.flag} = {asked.reference!r}"
    if last.message:
        raise ConfigError(f"{named}: {last.message}", hint=last.hint or _hint(asked), key=asked.flag)
    if last.gave:
        return last.gave
    when = "while it was called" if last.calls else "while it was imported"
    raise ConfigError(f"{named}: expected it to return, {when} {ended.words(limit_s)}", hint=_hint(asked), key=asked.flag)


def _hint(asked: Asked) -> str:
    return f"slime calls it as `{HOOKS[asked.flag].signature}`"


def main(arguments: Sequence[str]) -> None:
    """The process."""
    answer, text = begin(arguments)
    asked = msgspec.json.decode(text, type=Asked)
    try:
        check_hook(asked.flag, asked.reference, key=asked.flag)
        say(answer, Said(calls=True))
        from streamrl.bridges.slime.trials import run_trial

        gave = run_trial(asked)
        say(answer, Said(calls=True, gave=tuple(gave)))
    except BaseException as error:  # whatever the hook raises is what is wrong with it
        message, hint = _words(error, f"{asked.flag} = {asked.reference!r}: ")
        say(answer, Said(calls=True, message=message[:TAIL_BYTES], hint=hint))
    os._exit(0)  # threads that the hook has left behind are not waited for


def _words(error: BaseException, named: str) -> tuple[str, str]:
    if isinstance(error, StreamRLError):
        return error.message.removeprefix(named), error.hint
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((_OURS, "<"))]
    frames = [frame for frame in frames if not frame.filename.startswith(_PYTHON) or _INSTALLED in frame.filename]
    theirs = [frame for frame in frames if _INSTALLED not in frame.filename] or frames
    place = f" at {theirs[-1].filename} line {theirs[-1].lineno}" if theirs else ""
    text = str(error)
    return f"it raises {type(error).__name__}{f': {text}' if text else ''}{place}", ""


if __name__ == "__main__":
    main(sys.argv[1:])
