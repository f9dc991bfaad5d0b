"""How often a task has killed the process that ran it alone: the count behind `tasks.max_deliveries`.

It is a key of its own (`attempts/<task>`), because JetStream's delivery count also rises for neighbours of a guilty task, for drains, cut
connections and engines that failed. Removed when the task has ended.
"""

from __future__ import annotations

import logging
import re

from streamrl.bus.protocol import Bus, KeyEntry
from streamrl.errors import BusError, Conflict
from streamrl.runtime.task_keys import attempts_key, vanish

logger = logging.getLogger(__name__)

_COUNT = re.compile(rb"[0-9]{1,9}")
_TRIES = 8
"""To count one more while others do."""
KEPT_S = 7 * 86400.0
"""A count that nobody came back for vanishes after a week."""


class Attempts:
    """The counts of the tasks that one process works on."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[int, int] = {}

    def begin(self, task: int) -> None:
        """A task that nobody has worked on before."""
        self._known.setdefault(task, 0)

    async def load(self, task: int) -> int:
        """Deaths in earlier deliveries."""
        try:
            count = _count(await self._bus.kv.get(attempts_key(task)))
        except BusError as error:
            logger.warning("event=attempts_unknown task=%d error=%s", task, error.message)
            return 0
        self._known[task] = count
        return count

    async def add(self, task: int) -> int:
        """Count one more; returns how many there are, as far as this process can know."""
        try:
            count = await self._stored(task)
        except BusError as error:
            logger.warning("event=attempt_not_stored task=%d error=%s", task, error.message)
            count = self._known.get(task, 0) + 1
        self._known[task] = count
        return count

    async def _stored(self, task: int) -> int:
        """Raises BusError, of which Conflict where others count it all the time."""
        for attempt in range(1, _TRIES + 1):
            entry = await self._bus.kv.get(attempts_key(task))
            count = _count(entry) + 1
            try:
                await self._bus.kv.put(attempts_key(task), str(count).encode(), expect=0 if entry is None else entry.revision, ttl_s=KEPT_S)
            except Conflict:
                if attempt == _TRIES:
                    raise
            else:
                return count
        raise AssertionError("it returns or raises")

    async def forget(self, task: int) -> None:
        """Remove a task's count; call it when the task has ended, worked on here or not."""
        known = self._known.pop(task, None)
        try:
            if known or (known is None and await self._bus.kv.get(attempts_key(task)) is not None):
                await vanish(self._bus.kv, attempts_key(task))
        except BusError as error:
            logger.warning("event=attempts_left_behind task=%d error=%s", task, error.message)

    def drop(self, task: int) -> None:
        """No longer know of a task that was given back."""
        self._known.pop(task, None)


def _count(entry: KeyEntry | None) -> int:
    return int(entry.value) if entry is not None and entry.value and _COUNT.fullmatch(entry.value) else 0
