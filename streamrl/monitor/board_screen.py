"""The board on a terminal: moved by keys, drawn again on resize, left for a while at Ctrl-Z. For `streamrl top`, and for `up`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from streamrl.config.tree import Config
from streamrl.monitor.board import Board, Place, moved
from streamrl.monitor.drawing import draws, ink_of
from streamrl.monitor.look import Look, look_of
from streamrl.monitor.numbers import RunNumbers
from streamrl.monitor.recent import Recent
from streamrl.monitor.run_state import RUNNING
from streamrl.monitor.screen import Display, PlainLines, say
from streamrl.monitor.terminal import Terminal, in_front
from streamrl.monitor.view import RunView
from streamrl.runtime.rundir import RunDir

_NUM_NOTES = 5
_MOST_NOTES = 100
"""That came while there was a board, and are said again when it is gone."""


class BoardScreen:
    """A terminal that shows boards; as a context manager, inside a running loop.

    Args:
        keys: named first in the foot.
        stop: called when `q` is pressed; None: it means nothing.
        gone: called once it is known that nobody sees the screen any more.
    """

    def __init__(self, *, keys: str, stop: Callable[[], None] | None = None, gone: Callable[[], None]) -> None:
        self._keys, self._stop, self._gone = keys, stop, gone
        self._terminal = Terminal(self._press, gone)
        self._ink = ink_of(sys.stdout)
        self._place = Place()
        self._look: Look | None = None
        self._frozen: Look | None = None
        self._board: Board | None = None
        self._left = True
        """The terminal is others': until this process is in front, and since Ctrl-Z."""

    def __enter__(self) -> BoardScreen:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._draw_again)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGWINCH)
        loop.remove_signal_handler(signal.SIGTSTP)
        if not self._left:
            self._terminal.__exit__(kind, error, trace)

    def show(self, look: Look) -> None:
        """Draw it, or where it was paused, what was seen then; nothing in the background. Raises OSError when the terminal has gone."""
        self._look = look
        if self._left:
            if not self._terminal.in_front:
                return
            self._left = False  # what is taken in part is given back too
            self._terminal.enter()
        self._frozen = (self._frozen or look) if self._place.paused else None
        width, height = self._terminal.size
        self._board = Board(self._frozen or look, width, self._ink)
        self._terminal.draw(self._board.frame(self._place, height, self._keys))

    def _press(self, key: str) -> None:
        if key == "q" and self._stop is not None:
            self._stop()
        elif self._board is not None:
            self._place = moved(self._place, key, self._board, self._terminal.size[1])
            self._draw_again()

    def _draw_again(self) -> None:
        try:
            if self._look is not None:
                self.show(self._look)
        except OSError:
            self._gone()

    def _suspend(self) -> None:
        if not self._left:
            with contextlib.suppress(OSError):  # who has gone is noticed by the next draw
                self._terminal.leave()
            self._left = True
        os.kill(os.getpid(), signal.SIGSTOP)
        self._draw_again()


class BoardDisplay:
    """A run that this process keeps up: lines until it is prepared and in front, then the board, and at the end the notes that stood on it.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self._samples_bytes = config.bus.samples_bytes
        run = RunDir(Path(config.run.dir) / config.run.name)
        self._recent, self._log = Recent(run.metrics), run.events_path
        self._opened = contextlib.ExitStack()
        self._screen: BoardScreen | None = None
        self._notes: deque[str] = deque(maxlen=_NUM_NOTES)
        self._unsaid: deque[str] = deque(maxlen=_MOST_NOTES)
        self._num_unsaid = 0
        self._page = ""

    def __enter__(self) -> BoardDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._screen is None:
            return
        self._screen = None
        self._opened.close()
        with contextlib.suppress(OSError):  # the terminal may have been closed
            if left_out := self._num_unsaid - len(self._unsaid):
                say(f"{left_out} earlier notes are in {self._log}", sys.stdout)
            for text in self._unsaid:
                say(text, sys.stdout)

    def show(self, numbers: RunNumbers, view: RunView) -> None:
        """Draw the board."""
        if self._screen is None:
            if not in_front(sys.stdout.fileno()):
                return
            # Who has gone is noticed by the next draw, and told by a signal.
            self._screen = self._opened.enter_context(BoardScreen(keys="Ctrl-C stops  ", gone=lambda: None))
        notes = [*([self._page] if self._page else []), *self._notes]
        self._screen.show(look_of(view, numbers, self._recent, state=RUNNING, samples_bytes=self._samples_bytes, notes=notes))

    def note(self, text: str) -> None:
        """A line, that stands on the board until others have come."""
        said = f"[{time.strftime('%H:%M:%S')}] {text}"
        self._notes.append(said)
        if self._screen is None:
            say(said, sys.stdout)
        else:
            self._unsaid.append(said)
            self._num_unsaid += 1

    def page(self, address: str) -> None:
        """The address stays on the board."""
        self._page = f"page: {address}"
        if self._screen is None:
            say(self._page, sys.stdout)


def choose_display(config: Config, *, plain: bool) -> Display:
    """A board where one can be shown, else lines."""
    return BoardDisplay(config) if not plain and can_show() else PlainLines()


def can_show() -> bool:
    """Whether standard output is a terminal that can show a board, and this process is no job in the background."""
    return draws(sys.stdout) and in_front(sys.stdout.fileno())
