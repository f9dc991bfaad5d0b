"""Calls from the training thread into the bus's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Caller:
    """Runs coroutines of the bus's loop from the training thread and waits for them.

    The bus keeps its own thread, so that a long step never holds up its heartbeats.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; raises what it raised."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
