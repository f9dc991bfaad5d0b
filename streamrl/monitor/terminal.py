"""A terminal that is drawn on line by line, and whose keys are read: raw codes that every terminal since the VT100 knows, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import termios
import tty
from collections.abc import Callable, Generator, Sequence
from types import TracebackType

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""Alternate screen, no cursor, no wrapping: what is there now comes back at the end."""
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_NAMES = {
    "\t": "tab",
    "[A": "up",
    "[B": "down",
    "[C": "right",
    "[D": "left",
    "[H": "home",
    "[F": "end",
    "[Z": "back tab",
    "[1~": "home",
    "[4~": "end",
    "[5~": "page up",
    "[6~": "page down",
}
_SMALLEST = (20, 3)


def keys_of(text: str) -> list[str]:
    """Names of the keys whose codes a terminal has sent; a letter's name is the letter, a sequence that is not known is left out."""
    found = [one if len(one) == 1 else f"[{one[2:]}" for one in _KEY.findall(text)]
    return [name for one in found if (name := _NAMES.get(one, one if len(one) == 1 else ""))]


class Terminal:
    """Standard output as a screen, standard input as keys; as a context manager, inside a running loop.

    Args:
        key: called with the name of each key.
        gone: called when the terminal has gone.
    """

    def __init__(self, key: Callable[[str], None], gone: Callable[[], None]) -> None:
        self._key, self._gone = key, gone
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._reads = os.isatty(self._input)
        self._before: list[int | list[bytes | int]] | None = None

    def __enter__(self) -> Terminal:
        self.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # it may have gone
            self.leave()

    @property
    def in_front(self) -> bool:
        """Whether this process may use it: a job in the background that does is stopped."""
        return in_front(self._output)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines now; of a terminal that does not say, 80 and 24."""
        try:
            found = os.get_terminal_size(self._output)
        except OSError:
            return 80, 24
        if not found.columns or not found.lines:
            return 80, 24
        return max(_SMALLEST[0], found.columns), max(_SMALLEST[1], found.lines)

    def enter(self) -> None:
        """Take the terminal; raises OSError when it has gone."""
        if self._reads:
            with _modes():
                self._before = termios.tcgetattr(self._input)
                tty.setcbreak(self._input, termios.TCSADRAIN)
            asyncio.get_running_loop().add_reader(self._input, self._read)
        self._write(_ENTER)

    def leave(self) -> None:
        """Give it back as it was; nothing is to be left twice, though it does no harm. Raises OSError when it has gone."""
        if self._reads:
            asyncio.get_running_loop().remove_reader(self._input)
        before, self._before = self._before, None
        try:
            self._write(_LEAVE)
        finally:  # keys may come from a terminal that is there still
            if before is not None:
                with _modes():
                    termios.tcsetattr(self._input, termios.TCSADRAIN, before)

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines from the top; each must fit the width."""
        self._write(_HOME + "\r\n".join(line + _CLEAR_LINE for line in lines) + _CLEAR_BELOW)

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._output, data) :]

    def _read(self) -> None:
        try:
            data = os.read(self._input, 1024)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._input)
            self._gone()
            return
        for name in keys_of(data.decode(errors="ignore")):
            self._key(name)


@contextlib.contextmanager
def _modes() -> Generator[None]:
    """Inside, what fails does so with an OSError: that of `termios` is none."""
    try:
        yield
    except termios.error as error:
        raise OSError(*error.args) from error


def in_front(descriptor: int) -> bool:
    """Whether this process is the foreground job of a terminal, or it is not known that it is none."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not the terminal that controls this process
        return True
