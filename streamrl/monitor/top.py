"""`streamrl top`: a run on a screen of its own, as long as somebody looks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable

import msgspec
from rich.console import Console

from streamrl.monitor.board import Board, Look, Place, moved
from streamrl.monitor.looker import Looker
from streamrl.monitor.run_state import RUNNING
from streamrl.monitor.screen import PlainLines
from streamrl.monitor.terminal import Terminal
from streamrl.runtime.rundir import RunDir

_DRAW_S = 1.0
_PATIENCE_S = 30.0
"""For the one look of `--once`; a bus that does not answer is given up before."""


def top(run: RunDir, *, once: bool, as_json: bool) -> None:
    """Show the run until `q` is pressed; or once, as text or as JSON.

    Where there is no terminal to draw on (a pipe, TERM=dumb) lines are printed instead, until the run is down.
    """
    logging.getLogger().addHandler(logging.NullHandler())  # a line of a log would stand across the screen
    if once or as_json:
        look = asyncio.run(_once(run))
        print(msgspec.json.format(msgspec.json.encode(look), indent=2).decode() if as_json else _text(look))
    elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        asyncio.run(_watch(run))
    else:
        asyncio.run(_lines(run))


def _text(look: Look) -> str:
    console = Console()
    return "\n".join(Board(look, console.width if console.is_terminal else 160, console).text())


async def _once(run: RunDir) -> Look:
    async with _looking(run) as looker:
        return looker.last


async def _lines(run: RunDir) -> None:
    async with _looking(run) as looker:
        with PlainLines() as lines:
            said = ""
            while True:
                look = looker.last
                words = look.away or (f"run {look.run} is {look.state}" if look.state != RUNNING else "")
                if words and words.split(",")[0] != said:
                    lines.note(words)
                elif look.numbers is not None and not words:
                    lines.show(look.numbers)
                said = words.split(",")[0]
                if look.state != RUNNING:
                    return
                await asyncio.sleep(_DRAW_S)


async def _watch(run: RunDir) -> None:
    looker, view = Looker(run), _Screen(Console())
    loop = asyncio.get_running_loop()
    async with _following(looker) as following:
        with Terminal(view.press, view.done.set) as terminal:

            def suspend() -> None:
                terminal.leave()
                os.kill(os.getpid(), signal.SIGSTOP)
                terminal.enter()
                view.changed.set()

            handlers: dict[signal.Signals, Callable[[], None]] = {
                signal.SIGWINCH: view.changed.set,
                signal.SIGTSTP: suspend,
                signal.SIGTERM: view.done.set,
                signal.SIGHUP: view.done.set,
            }
            for number, handler in handlers.items():
                loop.add_signal_handler(number, handler)
            with contextlib.suppress(OSError):  # the terminal has gone
                while not view.done.is_set() and not following.done():
                    terminal.draw(view.lines(looker.last, *terminal.size))
                    await view.wait(_DRAW_S)
            for number in handlers:
                loop.remove_signal_handler(number)


class _Screen:
    """What somebody looks at, and where."""

    def __init__(self, console: Console) -> None:
        self.done = asyncio.Event()
        self.changed = asyncio.Event()
        """It has to be drawn again at once."""
        self._console = console
        self._place = Place()
        self._board: Board | None = None
        self._height = 24
        self._frozen: Look | None = None

    def press(self, key: str) -> None:
        """A key was pressed."""
        if key == "q":
            self.done.set()
        elif self._board is not None:
            self._place = moved(self._place, key, self._board, self._height)
        self.changed.set()

    def lines(self, look: Look, width: int, height: int) -> list[str]:
        """The lines of the screen; of the look at which it was paused, while it is."""
        self._frozen = (self._frozen or look) if self._place.paused else None
        self._board, self._height = Board(self._frozen or look, width, self._console), height
        return self._board.frame(self._place, height)

    async def wait(self, most_s: float) -> None:
        """Until something changes, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), most_s)
        self.changed.clear()


@contextlib.asynccontextmanager
async def _following(looker: Looker) -> AsyncGenerator[asyncio.Task[None]]:
    """`looker` at work; what it fails with is raised at the end."""
    following = asyncio.create_task(looker.follow())
    try:
        yield following
        if following.done():
            following.result()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@contextlib.asynccontextmanager
async def _looking(run: RunDir) -> AsyncGenerator[Looker]:
    """A looker with something to be seen, or one that has waited for it in vain."""
    looker = Looker(run)
    async with _following(looker) as following:
        ready = asyncio.create_task(looker.ready.wait())
        await asyncio.wait((following, ready), timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        yield looker
