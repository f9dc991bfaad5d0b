"""A module run in a process of its own for a limited time: whatever the code in it does, its end is known here."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import re
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import msgspec

from streamrl.runtime.service import describe_exit, die_with_parent

TAIL_BYTES = 4096
"""That are kept of what it has printed."""
_FRAME = re.compile(r'^  File "([^"<]+)", line (\d+) in ', re.MULTILINE)
"""A line of faulthandler's, which begins with the innermost frame."""
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Ended(msgspec.Struct, frozen=True):
    """How it went."""

    lines: tuple[bytes, ...]
    """What it has said by `say`."""
    code: int | None
    """Of its exit; None: its time was up."""
    tail: str
    """The end of what it has printed, faulthandler's words included."""

    @property
    def place(self) -> str:
        """` at FILE line N` of the user's code that ran at the end, or empty."""
        frames = _FRAME.findall(self.tail)
        theirs = [frame for frame in frames if not frame[0].startswith(_INSTALLED)] or frames
        return f" at {theirs[0][0]} line {theirs[0][1]}" if theirs else ""

    def words(self, limit_s: float) -> str:
        """What to say of a process that has not come to its end by itself."""
        if self.code is None:
            return f"it was still busy{self.place} after {limit_s:g} s"
        return f"its process ended with {describe_exit(self.code)}{self.place}"


async def run_apart(module: str, text: str, surroundings: Mapping[str, str], limit_s: float) -> Ended:
    """Run `python -m MODULE`, which calls `begin` with its arguments; it is killed at its end with its whole session.

    Args:
        module: its name.
        text: what it is told.
        surroundings: its environment.
        limit_s: how long it may take.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as answer:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(answer.fileno()), str(os.getpid()), str(limit_s), text),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=surroundings,
            pass_fds=(answer.fileno(),),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limit_s):
                code = await child.wait()
        except TimeoutError:
            code = None
        finally:
            # What it has started goes with it, unless that has begun a session of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
        answer.seek(0)
        return Ended(tuple(answer.read().splitlines()), code, _tail(output))


def begin(arguments: Sequence[str]) -> tuple[int, str]:
    """In the process, first of all: the descriptor to `say` to, and what it is told."""
    answer, parent, limit_s, text = int(arguments[0]), int(arguments[1]), float(arguments[2]), arguments[3]
    die_with_parent(parent)
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s / 2)
    return answer, text


def say(answer: int, said: msgspec.Struct) -> None:
    """A line for the other side."""
    os.write(answer, msgspec.json.encode(said) + b"\n")


def _tail(output: BinaryIO) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - TAIL_BYTES))
    return output.read().decode(errors="replace")
