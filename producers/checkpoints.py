"""Checkpoints of rollouts: what a producer stores of an episode half done, so that another goes on from it when the first one dies.

```text
context.checkpoint(data) --> key checkpoints/<task>/<rollout> --> context.resume of the next delivery
                                     removed when the task has ended
```

A checkpoint saves work and decides nothing: one that cannot be stored is logged and left out, and the episode begins again without it.
The keys share their stream with the grants and the presence of workers, so their size is bounded, for one and for all of a process.
"""

from __future__ import annotations

import logging

from streamrl.bus.protocol import Bus
from streamrl.errors import BusError, SchemaError
from streamrl.schemas.subjects import PREFIX_CHECKPOINTS

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
"""Largest checkpoint of one rollout, the turns that are stored with it included."""
BUDGET_BYTES = 16 << 20
"""Most that the open tasks of one process keep stored."""
KEPT_S = 7 * 86400.0
"""One that nobody came back for vanishes after a week."""


class RolloutCheckpoints:
    """Those of the tasks that one process works on. Used from the bus's event loop only."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._sizes: dict[int, dict[int, int]] = {}
        """Bytes stored by task and rollout."""

    async def load(self, task: int) -> dict[int, bytes]:
        """What an earlier delivery stored, by rollout."""
        try:
            found: dict[int, bytes] = {}
            for key in await self._bus.kv.keys(f"{PREFIX_CHECKPOINTS}{task}/"):
                rollout = key.rpartition("/")[2]
                if not rollout.isdigit():
                    logger.warning("event=key_ignored key=%s reason=expected_the_number_of_a_rollout", key)
                    continue
                entry = await self._bus.kv.get(key)
                if entry is not None and entry.value:
                    found[int(rollout)] = entry.value
        except BusError as error:
            logger.warning("event=checkpoints_unread task=%d error=%s", task, error.message)
            return {}
        if found:
            self._sizes[task] = {rollout: len(data) for rollout, data in found.items()}
            logger.info("event=task_resumed task=%d rollouts=%d", task, len(found))
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
        others = sum(sum(sizes.values()) for sizes in self._sizes.values()) - self._sizes.get(task, {}).get(rollout, 0)
        if others + len(data) > BUDGET_BYTES:
            logger.warning("event=checkpoint_lost task=%d rollout=%d reason=budget stored_bytes=%d", task, rollout, others)
            return
        try:
            await self._bus.kv.put(_key(task, rollout), data, ttl_s=KEPT_S)
        except BusError as error:
            logger.warning("event=checkpoint_lost task=%d rollout=%d error=%s", task, rollout, error.message)
            return
        self._sizes.setdefault(task, {})[rollout] = len(data)

    async def forget(self, task: int) -> None:
        """Remove a task's checkpoints; call it when its records are stored."""
        for rollout in self._sizes.pop(task, {}):
            try:
                # An empty value that expires at once leaves nothing behind; a deleted key would leave its marker for ever.
                await self._bus.kv.put(_key(task, rollout), b"", ttl_s=1.0)
            except BusError as error:
                logger.warning("event=checkpoint_left_behind task=%d rollout=%d error=%s", task, rollout, error.message)

    def drop(self, task: int) -> None:
        """No longer count what is stored of a task that was given back: its next producer does."""
        self._sizes.pop(task, None)


def _key(task: int, rollout: int) -> str:
    return f"{PREFIX_CHECKPOINTS}{task}/{rollout}"
