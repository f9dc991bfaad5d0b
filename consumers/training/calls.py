"""Calls from the training thread into the bus's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from streamrl.telemetry.clock import StateClock

T = TypeVar("T")


class Caller:
    """Runs coroutines of the bus's loop from the training thread and waits for them.

    The bus keeps its own thread, so that a long step never holds up its heartbeats.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: StateClock | None = None) -> None:
        self.loop = loop
        self.clock = clock or StateClock("setup")
        """Of the training thread; while it waits here it is in the state `wait_bus`."""

    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; raises what it raised."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        with self.clock.within("wait_bus"):
            return future.result()
