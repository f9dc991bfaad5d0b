"""The key `granted`: raised as the trainer goes on, without making it wait."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from streamrl.bus.protocol import Bus
from streamrl.consumers.calls import Caller
from streamrl.errors import Conflict
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant
from streamrl.schemas.subjects import KEY_GRANTED


class Grants:
    """Raises the key in the background; it never goes down. The methods belong to the training thread.

    A grant that is lost in a crash is raised again by the trainer that comes next, from its state, and nothing else depends on when it
    arrives. So the training thread does not wait for the bus after every batch, when engines may run dry.
    """

    def __init__(self, bus: Bus, call: Caller) -> None:
        self._bus = bus
        self._loop = call.loop
        self._granted = 0
        self._raised: Future[None] | None = None
        self._revision: int | None = None
        """Of the key as it was last seen."""
        self._written = 0

    def raise_to(self, grant: Grant) -> None:
        """Raise the key to this grant, unless one before was as high.

        Raises:
            BusError: an earlier grant could not be written.
        """
        if grant.granted <= self._granted:
            return
        self._granted = grant.granted
        self.check()
        self._raised = asyncio.run_coroutine_threadsafe(self._raise(grant, self._raised), self._loop)

    def check(self) -> None:
        """Raise BusError if a grant could not be written. To be called while waiting: without it no more records may ever come."""
        if self._raised is not None and self._raised.done():
            self._raised.result()

    def settle(self) -> None:
        """Wait until the key is as high as it was asked to be; raises BusError."""
        if self._raised is not None:
            self._raised.result()

    async def _raise(self, grant: Grant, before: Future[None] | None) -> None:
        if before is not None:
            await asyncio.wrap_future(before)  # in order; fails when it failed
        while True:
            if self._revision is None:
                entry = await self._bus.kv.get(KEY_GRANTED)
                self._revision = entry.revision if entry else 0
                if entry is not None and entry.value is not None:
                    self._written = decode(entry.value, Grant, where=KEY_GRANTED).granted
            if self._written >= grant.granted:
                return
            try:
                self._revision = await self._bus.kv.put(KEY_GRANTED, encode(grant), expect=self._revision)
                self._written = grant.granted
            except Conflict:  # a trainer before this one, or after it: look what it wrote
                self._revision = None
                continue
            return
