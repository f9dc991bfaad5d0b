"""Processes that run the same user code: started when they are needed, watched by one clock, buried when they are of no use."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable

from streamrl.errors import ConfigError
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.child import Child
from streamrl.producers.children.frames import Hello

_LOADS = 3
"""Processes that are started for one, while they are killed with SIGKILL before the user's code is loaded."""

_MOST = 4
CORES = os.cpu_count() or 1

logger = logging.getLogger(__name__)


def default_count() -> int:
    """Children of a worker whose configuration leaves it open: one a core, at most four."""
    return min(_MOST, CORES)


class Crew:
    """Starts, watches and buries children.

    Args:
        hello: what each of them loads.
        limits: of their start and of their calls.
        tick_s: seconds between two looks at them.
        looked: called after each look.
    """

    def __init__(self, hello: Hello, limits: Limits, *, tick_s: float, looked: Callable[[], None]) -> None:
        self.hello = hello
        self.limits = limits
        self.all: list[Child] = []
        self.failure: BaseException | None = None
        """Why no more can be started."""
        self._tick_s = tick_s
        self._looked = looked
        self._numbers = itertools.count()
        self._clock: asyncio.Task[None] | None = None
        self._burials: set[asyncio.Task[None]] = set()

    @property
    def notice(self) -> str:
        """What people should know of user code now; empty: nothing."""
        return next((child.notice for child in self.all if child.notice), "")

    async def add(self, *, alone: bool) -> Child:
        """Start one; returns it once it has loaded the user's code.

        Args:
            alone: as `Child` has it.

        Raises:
            ConfigError: the user's code cannot be loaded.
            LaunchError: no process can be started.
        """
        if self._clock is None or self._clock.done():
            self._clock = asyncio.create_task(self._tick())
            self._clock.add_done_callback(self._stopped)
        left = _LOADS
        while True:
            child = Child(next(self._numbers), self.hello, self.limits, alone=alone)
            self.all.append(child)
            try:
                await child.started()
                break
            except BaseException as error:
                self.bury(child)
                left -= 1
                # Somebody's hand, or the kernel's, says nothing of the code.
                if not left or not isinstance(error, ConfigError) or child.exit_code != -signal.SIGKILL:
                    raise
        logger.info("event=child_started child=%d of=%s alone=%s", child.number, "producer" if self.hello.function else "reward", alone)
        return child

    def bury(self, child: Child) -> None:
        """End it and free what it had, without waiting for that."""
        if child in self.all:
            self.all.remove(child)
            burial = asyncio.ensure_future(child.close())
            self._burials.add(burial)
            burial.add_done_callback(self._burials.discard)

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(child.close() for child in self.all), *self._burials)
        self.all.clear()
        if self._clock is not None:
            self._clock.cancel()

    def _stopped(self, clock: asyncio.Task[None]) -> None:
        """Without a clock nothing is limited, so an error in it ends everything."""
        if not clock.cancelled() and (error := clock.exception()) is not None:
            self.failure = error
            for child in list(self.all):
                child.kill(f"the watch ended: {error!r}")

    async def _tick(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            # What lies beyond is time in which this process stood still itself.
            seconds, before = min(now - before, 2 * self._tick_s), now
            for child in list(self.all):
                child.tick(seconds)
            self._looked()
