"""Checkpoints of rollouts: what a producer stores of an episode half done, so that another goes on from it when the first one dies.

```text
context.checkpoint(data) --> key checkpoints/<task>/<rollout> --> context.resume of the next delivery
                                     removed when the task has ended, by whoever sees its end
```

A checkpoint saves work and decides nothing: one that cannot be stored is logged and left out, and the episode begins again without it.
The keys share their stream with the grants and the presence of workers, which a run lives by, so their size is bounded: for one, for all of
a process, and for all of the run, the last by as much more as its processes store at the same moment (`AT_ONCE`).
"""

from __future__ import annotations

import asyncio
import logging

from streamrl.bus.protocol import Bus
from streamrl.errors import BusError, SchemaError
from streamrl.runtime.task_keys import checkpoint_key, checkpoint_keys, vanish

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
"""Largest checkpoint of one rollout, the turns that are stored with it included."""
BUDGET_BYTES = 16 << 20
"""Most that the open tasks of one process keep stored."""
RUN_BYTES = 32 << 20
"""With so much under keys, whoever's it is, no process stores another one: half of the keys' stream is the run's."""
AT_ONCE = 2
"""Checkpoints that one process stores at a time: as many more may come to lie there before others see them."""
KEPT_S = 7 * 86400.0
"""One that nobody came back for vanishes after a week."""


class RolloutCheckpoints:
    """Those of the tasks that one process works on. Used from the bus's event loop only."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._sizes: dict[int, dict[int, int]] = {}
        """Bytes stored by task and rollout, of the tasks of which this process knows all that is stored."""
        self._room = asyncio.Semaphore(AT_ONCE)
        self._behind: set[int] = set()
        """Tasks that have ended and of which something could not be removed; it counts until it is."""

    def begin(self, task: int) -> None:
        """A task that nobody has worked on before: nothing is stored of it."""
        self._sizes.setdefault(task, {})

    async def load(self, task: int) -> dict[int, bytes]:
        """What an earlier delivery stored, by rollout."""
        try:
            found: dict[int, bytes] = {}
            for rollout in await self._stored(task):
                entry = await self._bus.kv.get(checkpoint_key(task, rollout))
                if entry is not None and entry.value:
                    found[rollout] = entry.value
        except BusError as error:
            logger.warning("event=checkpoints_unread task=%d error=%s", task, error.message)
            return {}
        self._sizes[task] = {rollout: len(data) for rollout, data in found.items()}
        if found:
            logger.info("event=task_resumed task=%d rollouts=%d", task, len(found))
        return found

    async def _stored(self, task: int) -> list[int]:
        """Rollouts that have a checkpoint, whoever stored it."""
        found: list[int] = []
        for key in await checkpoint_keys(self._bus.kv, task):
            rollout = key.rpartition("/")[2]
            if rollout.isdigit():
                found.append(int(rollout))
            else:
                logger.warning("event=key_ignored key=%s reason=expected_the_number_of_a_rollout", key)
        return found

    async def save(self, task: int, rollout: int, data: bytes) -> None:
        """Store a rollout's newest checkpoint in place of its older one.

        Raises:
            SchemaError: `data` is larger than `MAX_BYTES`.
        """
        if len(data) > MAX_BYTES:
            raise SchemaError(
                f"a checkpoint of a rollout may have {MAX_BYTES} bytes, got {len(data)} (task {task}, rollout {rollout})",
                hint="store what cannot be made again, and large things under a name of their own elsewhere",
            )
        before = self._sizes.get(task, {}).get(rollout, 0)
        others = sum(sum(sizes.values()) for sizes in self._sizes.values()) - before
        if others + len(data) > BUDGET_BYTES:
            logger.warning("event=checkpoint_lost task=%d rollout=%d reason=budget stored_bytes=%d", task, rollout, others)
            return
        # Counted before it is sent: who is cancelled or hears no answer meanwhile does not know which of the two is stored.
        sizes = self._sizes.setdefault(task, {})
        sizes[rollout] = max(before, len(data))
        try:
            async with self._room:
                there = await self._bus.kv.size() - before
                if there + len(data) > RUN_BYTES:
                    sizes[rollout] = before
                    if not before:
                        del sizes[rollout]
                    logger.warning("event=checkpoint_lost task=%d rollout=%d reason=run_budget stored_bytes=%d", task, rollout, there)
                    return
                await self._bus.kv.put(checkpoint_key(task, rollout), data, ttl_s=KEPT_S)
        except BusError as error:
            logger.warning("event=checkpoint_lost task=%d rollout=%d error=%s", task, rollout, error.message)
            return
        sizes[rollout] = len(data)

    async def forget(self, task: int) -> None:
        """Remove a task's checkpoints; call it when the task has ended, worked on here or not. What fails is tried again with the next."""
        for ended in (task, *self._behind):
            self._behind.discard(ended)
            try:
                await self._remove(ended)
            except BusError as error:
                logger.warning("event=checkpoints_left_behind task=%d error=%s", ended, error.message)
                self._behind.add(ended)
                return

    async def _remove(self, task: int) -> None:
        known = self._sizes.get(task)
        for rollout in await self._stored(task) if known is None else list(known):
            await vanish(self._bus.kv, checkpoint_key(task, rollout))
            if known is not None:
                known.pop(rollout, None)
        self._sizes.pop(task, None)

    def drop(self, task: int) -> None:
        """No longer count what is stored of a task that was given back: its next producer does."""
        self._sizes.pop(task, None)
