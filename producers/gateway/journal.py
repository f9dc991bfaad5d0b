"""The journal of each open session on the bus: an entry a key, which is stored before the call that it records is answered.

```text
<task>/<rollout>/<n>      in a bucket of its own, which is bounded (`bus.turns_bytes`); removed once the task has ended
```

An entry is stored under a number that nobody has used yet, or not at all: of two gateways that hold a task, because one was stopped for
longer than its lease, only one goes on.
"""

from __future__ import annotations

import logging

import msgspec

from streamrl.bus.protocol import KeyValue
from streamrl.errors import BusError, Conflict, SchemaError
from streamrl.producers.gateway.entries import Entry

logger = logging.getLogger(__name__)

KEPT_S = 7 * 86400.0
"""An entry that nobody came back for vanishes after a week."""
MAX_BYTES = 7 << 20
"""Largest entry."""


class Journal:
    """Entries by task and rollout.

    Args:
        keys: the bucket.
    """

    def __init__(self, keys: KeyValue) -> None:
        self._keys = keys
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Entry)
        self._behind: set[int] = set()
        """Tasks that have ended and whose entries could not be removed."""

    async def append(self, task: int, rollout: int, number: int, entry: Entry) -> None:
        """Store entry `number`; returns once the bus has it.

        Raises:
            Conflict: another gateway has stored an entry of this number.
            StreamFull: the bucket has no room.
            BusUnavailable: the bus stayed away; the entry may have been stored.
            SchemaError: it is too large.
        """
        body = self._encoder.encode(entry)
        if len(body) > MAX_BYTES:
            raise SchemaError(f"expected an entry of a session of at most {MAX_BYTES} bytes, got {len(body)}")
        key = f"{task}/{rollout}/{number}"
        try:
            await self._keys.put(key, body, expect=0, ttl_s=KEPT_S)
        except Conflict:
            there = await self._keys.get(key)  # a first attempt may have been stored whose answer got lost
            if there is None or there.value != body:
                raise

    async def has(self, task: int, rollout: int, number: int, entry: Entry) -> bool:
        """Whether entry `number` is this one; raises BusError."""
        there = await self._keys.get(f"{task}/{rollout}/{number}")
        return there is not None and there.value == self._encoder.encode(entry)

    async def load(self, task: int) -> dict[int, list[Entry]]:
        """What is there of a task, by rollout, in order.

        Raises:
            BusError: it cannot be read now.
            SchemaError: an entry is damaged, or one is missing before another.
        """
        found: dict[int, dict[int, Entry]] = {}
        for key, value in (await self._keys.values(f"{task}/")).items():
            if not value:
                continue
            _, rollout, number = key.split("/")
            try:
                found.setdefault(int(rollout), {})[int(number)] = self._decoder.decode(value)
            except (msgspec.MsgspecError, ValueError) as error:
                raise SchemaError(f"expected an entry of a session under {key}, got {len(value)} bytes that are none: {error}") from error
        return {rollout: _in_order(task, rollout, entries) for rollout, entries in found.items()}

    async def forget(self, task: int) -> None:
        """Remove a task's entries: it has ended. What fails is tried again with the next."""
        for ended in (task, *self._behind):
            self._behind.discard(ended)
            try:
                await self._keys.remove(f"{ended}/")
            except BusError as error:
                logger.warning("event=turns_left_behind task=%d error=%s", ended, error.message)
                self._behind.add(ended)
                return


def _in_order(task: int, rollout: int, entries: dict[int, Entry]) -> list[Entry]:
    if sorted(entries) != list(range(len(entries))):
        raise SchemaError(f"expected entries 0 to {len(entries) - 1} of session {task}.{rollout}, got {sorted(entries)}")
    return [entries[number] for number in range(len(entries))]
