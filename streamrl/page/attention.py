"""Whether somebody looks at the page: what nobody looks at is brought up to date now and then only, and costs the run next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

LOOKED_AT_S = 20.0
"""So long after a request somebody is taken to look still; a page that is open asks every second or two."""


class Attention:
    """Told of requests with `seen`; of one event loop."""

    def __init__(self) -> None:
        self._last_s = -math.inf
        self._come = asyncio.Event()

    def seen(self) -> None:
        """Somebody has asked for something."""
        self._last_s = time.monotonic()
        self._come.set()

    @property
    def there(self) -> bool:
        """Whether somebody looks."""
        return time.monotonic() - self._last_s < LOOKED_AT_S

    async def wait(self, longest_s: float) -> None:
        """Return at the next request, or after `longest_s`."""
        self._come.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._come.wait(), longest_s)
