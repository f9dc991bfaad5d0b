"""A thread that looks at the event loop: who holds it, in which line of the user's code, and how much of its time blocking calls take."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from asyncio import Task
from collections import deque
from collections.abc import Callable
from typing import Any

from streamrl.producers.children import frames
from streamrl.producers.children.canary import OwnTask
from streamrl.producers.children.remote import current
from streamrl.producers.places import place_of

BEAT_S = 0.02
WINDOW_S = 10.0
_LAG_S = 0.04
"""A loop that has not turned for this long is looked into."""
_HELD_S = 1.0
_HELD_EVERY_S = 0.25
_SLOW_S = 1.0
"""Blocked seconds within the window that are worth a word."""
_SAID_EVERY_S = 10.0


class Watchdog:
    """Says `Held` while the loop has not turned for a second, and `Slow` when blocking calls add up.

    Args:
        loop: to be watched; its tasks are made so that it is known to which call they belong.
        send: a frame to the parent, from any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[frames.Said], None]) -> None:
        self._loop = loop
        self._send = send
        self._beat = 0
        self._beat_s = time.monotonic()
        self._step = 0
        self._seen: tuple[int, int] = (0, 0)
        self._blocked: deque[tuple[float, str]] = deque()
        self._held_s = 0.0
        self._said_s = -_SAID_EVERY_S
        self._thread = 0

    def start(self) -> None:
        """Begin; in the loop's thread."""
        self._thread = threading.get_ident()
        self._loop.set_task_factory(self._make)
        self._turn()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _make(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        asking = current.get()
        return Task(coroutine, loop=loop, **options) if asking is None else OwnTask(coroutine, asking=asking, loop=loop, **options)

    def _turn(self) -> None:
        self._beat += 1
        self._beat_s = time.monotonic()
        self._loop.call_later(BEAT_S, self._turn)

    def _watch(self) -> None:
        while True:
            time.sleep(BEAT_S)
            now_s = time.monotonic()
            if now_s - self._beat_s > _LAG_S:
                self._look(now_s)

    def _look(self, now_s: float) -> None:
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]  # documented, for debuggers such as this
        place = place_of(frame)
        del frame
        if not place:
            return
        if (seen := (self._beat, id(task))) != self._seen:
            self._seen, self._step = seen, self._step + 1
        self._blocked.append((now_s, place))
        while self._blocked[0][0] < now_s - WINDOW_S:
            self._blocked.popleft()
        if now_s - self._beat_s > _HELD_S and now_s - self._held_s > _HELD_EVERY_S:
            self._held_s = now_s
            self._send(frames.Held(task.asking.call if isinstance(task, OwnTask) else None, self._step, place))
        here = sum(BEAT_S for _, other in self._blocked if other == place)
        if here > _SLOW_S and now_s - self._said_s > _SAID_EVERY_S:
            self._said_s = now_s
            self._send(frames.Slow(place, here))
