"""`streamrl top`: a run on a screen of its own, as long as somebody looks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
from collections.abc import AsyncGenerator

import msgspec

from streamrl.monitor.board import Board
from streamrl.monitor.board_screen import BoardScreen, can_show
from streamrl.monitor.drawing import ink_of
from streamrl.monitor.look import Look
from streamrl.monitor.looker import Looker
from streamrl.monitor.run_state import RUNNING
from streamrl.monitor.screen import PlainLines
from streamrl.runtime.rundir import RunDir

_DRAW_S = 1.0
_PIPE_WIDTH = 160
_PATIENCE_S = 30.0
"""For the one look of `--once`; a bus that does not answer is given up before."""


def top(run: RunDir, *, once: bool, as_json: bool) -> None:
    """Show the run until `q` is pressed; or once, as text or as JSON.

    Where there is no terminal to draw on (a pipe, TERM=dumb, in the background) lines are printed instead, until the run is down.
    """
    logging.getLogger().addHandler(logging.NullHandler())  # a line of a log would stand across the screen
    if once or as_json:
        look = asyncio.run(_once(run))
        print(msgspec.json.format(msgspec.json.encode(look), indent=2).decode() if as_json else _text(look))
    elif can_show():
        asyncio.run(_watch(run))
    else:
        asyncio.run(_lines(run))


def _text(look: Look) -> str:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    return "\n".join(Board(look, width, ink_of(sys.stdout)).text())


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
    looker, done = Looker(run), asyncio.Event()
    loop = asyncio.get_running_loop()
    async with _following(looker) as following:
        with BoardScreen(keys="q quit  ", stop=done.set, gone=done.set) as screen:
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, done.set)
            with contextlib.suppress(OSError):  # the terminal has gone
                while not done.is_set() and not following.done():
                    screen.show(looker.last)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(done.wait(), _DRAW_S)


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
