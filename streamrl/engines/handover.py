"""Chunks of one request on their way to whoever asked, and the count of what never got there."""

from __future__ import annotations

import asyncio

from streamrl.engines.lost import Lost
from streamrl.engines.protocol import Chunk
from streamrl.errors import StreamRLError


class Handover:
    """A queue of chunks, drained by `generate`; it holds at most one chunk a token. All methods belong to one event loop.

    Args:
        completions: of the request.
        stream: whether chunks are of use by themselves; else the answer is sent once all completions have ended.
        lost: counts what nobody gets.
    """

    def __init__(self, completions: int, *, stream: bool, lost: Lost) -> None:
        self._queue: asyncio.Queue[Chunk | StreamRLError] = asyncio.Queue()
        self._lengths = [0] * completions
        """Tokens so far, by completion."""
        self._whole: set[int] = set()
        """Completions that have ended."""
        self._stream = stream
        self._lost = lost
        self._left = False

    def put_nowait(self, item: Chunk | StreamRLError) -> None:
        """Hand on a chunk, or why there is none."""
        if not self._left:
            self._queue.put_nowait(item)
        elif isinstance(item, Chunk):
            self._lose(item)

    async def get(self) -> Chunk | StreamRLError:
        """The next item."""
        item = await self._queue.get()
        if isinstance(item, Chunk):
            self._count(item)
        return item

    def leave(self) -> None:
        """Nobody waits any more, and completions are open: what comes now is lost, and without `stream` what came before."""
        self._left = True
        if not self._stream:
            self._lost.tokens += sum(self._lengths)
            for index in self._whole:
                self._lost.ended(self._lengths[index])
        while not self._queue.empty():
            self.put_nowait(self._queue.get_nowait())

    def _count(self, chunk: Chunk) -> None:
        self._lengths[chunk.completion] += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._whole.add(chunk.completion)

    def _lose(self, chunk: Chunk) -> None:
        self._count(chunk)
        self._lost.tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._lost.ended(self._lengths[chunk.completion])
