"""Parts of a version as blobs: stored and read several at a time, each checked against its digest in the manifest."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from streamrl.bus.protocol import Blobs
from streamrl.errors import BusError, NotFound, StreamFull, WeightSyncError
from streamrl.schemas.weights import PartRef
from streamrl.weights.changes import Source
from streamrl.weights.manifest import cut

UNDER_WAY = 3
"""Parts that are on their way at once: one is being digested or applied while the next are being transferred."""
Put = Callable[[], Awaitable[PartRef]]
Moved = Callable[[], None] | None


class Gone(WeightSyncError):
    """A part is not there any more."""


class PartStore:
    """Parts on the bus's blobs."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def put(self, prefix: str, parts: Sequence[memoryview], *, what: str, moved: Moved = None) -> tuple[PartRef, ...]:
        """Store parts as `<prefix>/<index>`; all of them or none. `moved` is called behind each.

        Messages call them `what`: the policy and the version.

        Raises:
            WeightSyncError: the bus has no room; what had been stored is removed.
        """
        starts = list(accumulate(map(len, parts), initial=0))
        puts = [partial(self._put, f"{prefix}/{index:05d}", starts[index], part) for index, part in enumerate(parts)]
        return await self._put_all(puts, starts[-1], what, moved)

    async def put_content(self, prefix: str, content: Source, limit: int, *, what: str, moved: Moved = None) -> tuple[PartRef, ...]:
        """The same for all bytes of `content`, in parts of `limit` bytes that are made when it is their turn."""

        async def put(index: int, start: int, nbytes: int) -> PartRef:
            data = np.empty(nbytes, np.uint8)
            await asyncio.to_thread(content.fill, start, data)
            return await self._put(f"{prefix}/{index:05d}", start, data.data)

        pieces = enumerate(cut(content.nbytes, limit))
        return await self._put_all([partial(put, index, piece.start, piece.nbytes) for index, piece in pieces], content.nbytes, what, moved)

    async def get(self, parts: Sequence[PartRef], *, what: str) -> AsyncGenerator[tuple[PartRef, memoryview]]:
        """The parts in order, some read ahead.

        Raises:
            Gone: a part is not there.
            WeightSyncError: one cannot be read, or has other bytes than it should.
        """
        waiting: deque[tuple[PartRef, asyncio.Task[memoryview]]] = deque()
        left = iter(parts)
        try:
            while True:
                while len(waiting) < UNDER_WAY and (part := next(left, None)) is not None:
                    waiting.append((part, asyncio.create_task(self._get(part, what))))
                if not waiting:
                    return
                part, task = waiting.popleft()
                yield part, await task
        finally:
            tasks = [task for _, task in waiting]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _put(self, name: str, offset: int, data: memoryview) -> PartRef:
        digest = await self._blobs.put(name, data)
        return PartRef(location=name, offset=offset, nbytes=len(data), sha256=digest)

    async def _put_all(self, puts: Iterable[Put], nbytes: int, what: str, moved: Moved) -> tuple[PartRef, ...]:
        room = asyncio.Semaphore(UNDER_WAY)
        stored: list[PartRef] = []

        async def one(put: Put) -> PartRef:
            async with room:
                part = await put()
            stored.append(part)
            if moved is not None:
                moved()
            return part

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(put)) for put in puts]
        except BaseExceptionGroup as failures:
            failure = failures.exceptions[0]
            if not isinstance(failure, StreamFull):
                raise failure from None
            for part in stored:
                await self._blobs.delete(part.location)
            raise WeightSyncError(
                f"cannot store {nbytes} bytes of {what} on the bus: {failure.message}",
                hint="raise bus.blobs_bytes or lower weights.keep",
                size_bytes=nbytes,
            ) from failure
        return tuple(task.result() for task in tasks)

    async def _get(self, part: PartRef, what: str) -> memoryview:
        try:
            data = memoryview(await self._blobs.get(part.location))
        except NotFound as error:
            raise Gone(
                f"{what}: expected blob {part.location}, got none of that name",
                hint="a version is removed when newer ones are out: take a newer one",
                blob=part.location,
            ) from error
        except BusError as error:
            raise WeightSyncError(f"{what}: blob {part.location} cannot be read: {error.message}", hint=error.hint) from error
        digest = await asyncio.to_thread(sha256_of, data)
        if len(data) != part.nbytes or digest != part.sha256:
            raise WeightSyncError(
                f"{what}: expected {part.nbytes} bytes with sha256 {part.sha256[:12]}... in blob {part.location}, "
                f"got {len(data)} with {digest[:12]}...",
                hint="a newer version or a restart of the trainer brings good bytes",
                sha256=part.sha256,
            )
        return data


def sha256_of(data: memoryview) -> str:
    """In hex, as manifests have it."""
    return hashlib.sha256(data).hexdigest()
