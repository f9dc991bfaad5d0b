"""The process that serves the page of a run: beside `up`, or of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable

import msgspec

from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.page.access import page_token
from streamrl.page.address import Address, address_path, page_folder
from streamrl.page.attention import Attention
from streamrl.page.branch import parent_of
from streamrl.page.index import Index, open_index
from streamrl.page.log import ParentLog, RunLog
from streamrl.page.server import Page, served
from streamrl.runtime.beats import BEAT_S, Pulse
from streamrl.runtime.rundir import RunDir
from streamrl.system import write_private

logger = logging.getLogger(__name__)

_LATER_S = 0.5


async def serve(run: RunDir, *, port: int, say: Callable[[str], None], supervised: bool = False, pulse: Pulse | None = None) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        run: prepared.
        port: on 127.0.0.1; 0: the one that it had before, else any free one.
        say: told the address, then how far reading is.
        supervised: what is said goes to a log, which gets no secret: the supervisor knows the address from its file.
        pulse: of this process; None: nobody listens.

    Raises:
        LaunchError: another process serves the page of this run, or the port is taken.
        ConfigError: the run has no configuration that can be read.
    """
    config = run.load_config()
    pulse = pulse or Pulse(None)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    pulse.beat(loading=True)
    with open_index(run) as index:
        token, attention = page_token(run), Attention()
        page = Page(run, config, index, log_of(run, index, config, attention), attention)
        async with contextlib.AsyncExitStack() as opened:
            try:
                got = await opened.enter_async_context(served(page.app(token), port or _port_before(run)))
            except LaunchError:
                if port:
                    raise
                got = await opened.enter_async_context(served(page.app(token), 0))
            address = f"http://127.0.0.1:{got}/?token={token}"
            write_private(page_folder(run) / "port", str(got).encode())
            write_private(address_path(run), msgspec.json.encode(Address(pid=os.getpid(), address=address)))
            opened.callback(address_path(run).unlink, missing_ok=True)
            say(address if not supervised else f"served on port {got}")
            work = asyncio.create_task(page.work())
            progress = asyncio.create_task(_tell_progress(page, say))
            stopped = asyncio.create_task(stop.wait())
            beats = asyncio.create_task(_beat(pulse))
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            tasks = (work, progress, stopped, beats)
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended


def log_of(run: RunDir, index: Index, config: Config, attention: Attention) -> RunLog:
    """The run's log; of a branch, which has none, that of its parent."""
    if index.branch is not None:
        return ParentLog(parent_of(run, index.branch), index, config.trainer.name, attention)
    return RunLog(run, index, config.trainer.name, attention)


async def _beat(pulse: Pulse) -> None:
    while True:
        pulse.beat(loading=False)
        await asyncio.sleep(BEAT_S)


async def _tell_progress(page: Page, say: Callable[[str], None]) -> None:
    """Reading that takes longer than a moment is said, in steps of a tenth."""
    told = -1
    await asyncio.sleep(_LATER_S)
    while page.reading:
        progress = page.progress()
        tenth = 10 * progress.done // max(1, progress.total)
        if tenth != told:
            told = tenth
            say(f"reading the run's metrics: {10 * tenth} % of {progress.total / 1e6:.0f} MB")
        await asyncio.sleep(_LATER_S)
    if told >= 0:
        say("all of them are read")


def _port_before(run: RunDir) -> int:
    try:
        port = int((page_folder(run) / "port").read_text())
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 65536 else 0
