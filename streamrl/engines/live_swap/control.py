"""Our worker's end of the channel to one rank's plugin."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from streamrl.engines.live_swap.messages import (
    COPY_KEY,
    EPOCH_KEY,
    NUMBER_KEY,
    CommitLog,
    Commits,
    Failed,
    ForwardLog,
    Forwards,
    Hello,
    Prepare,
    Prepared,
    Rank,
    Reply,
    Request,
    Served,
    ServedDigest,
    Stage,
    Staged,
    decode_reply,
    frame,
    frame_length,
    socket_path,
)
from streamrl.errors import EngineError, WeightSyncError
from streamrl.schemas.versions import Version

R = TypeVar("R", bound=Reply)
QUICK_S = 30.0
"""For a question that costs nothing; it may have to wait for a version that is being staged."""


def commit_body(version: Version, *, copy: bool = False) -> dict[str, dict[str, int]]:
    """Body of `POST /set_internal_state` that makes every rank commit a staged version before the same forward pass.

    Args:
        version: the one to serve.
        copy: copy into the served buffer even where a flip is possible.
    """
    numbers = {EPOCH_KEY: version.epoch, NUMBER_KEY: version.number}
    return {"server_args": {**numbers, COPY_KEY: 1} if copy else numbers}


class RankClient:
    """Requests to one rank, one at a time.

    Args:
        directory: of the sockets.
        rank: whose plugin to talk to.
        patience_s: how long staging or preparing may take.
    """

    def __init__(self, directory: str, rank: int, *, patience_s: float = 600.0) -> None:
        self.rank = rank
        self._path = socket_path(directory, rank)
        self._patience_s = patience_s
        self._turn = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def hello(self) -> Rank:
        """Who is there. Raises EngineError when nobody answers."""
        return await self._ask(Hello(), Rank, QUICK_S)

    async def prepare(self, request: Prepare) -> Prepared:
        """Let the rank record a layout. Raises WeightSyncError when it does not fit its model."""
        return await self._ask(request, Prepared, self._patience_s)

    async def stage(self, request: Stage) -> Staged:
        """Let the rank stage a version. Raises WeightSyncError when it cannot."""
        return await self._ask(request, Staged, self._patience_s)

    async def commits(self, after: int = 0) -> CommitLog:
        """What commit requests have done on the rank."""
        return await self._ask(Commits(after), CommitLog, self._patience_s)

    async def forwards(self) -> ForwardLog:
        """Forward passes since the last call. Raises WeightSyncError when they are not recorded."""
        return await self._ask(Forwards(), ForwardLog, self._patience_s)

    async def served(self, layout: str) -> Served:
        """Digests of what the rank serves, read back from its memory."""
        return await self._ask(ServedDigest(layout), Served, self._patience_s)

    async def close(self) -> None:
        """Let go of the connection."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with contextlib.suppress(OSError):
                await streams[1].wait_closed()

    async def _ask(self, request: Request, kind: type[R], timeout_s: float) -> R:
        async with self._turn:
            try:
                reply = await asyncio.wait_for(self._exchange(request), timeout_s)
            except TimeoutError as error:
                await self.close()
                raise EngineError(
                    f"rank {self.rank}: expected an answer to {type(request).__name__} within {timeout_s:.0f} s from {self._path}"
                ) from error
            except asyncio.CancelledError:
                # The answer would be read as that of the next request.
                await self.close()
                raise
            except (OSError, asyncio.IncompleteReadError) as error:
                await self.close()
                raise EngineError(
                    f"rank {self.rank}: the plugin at {self._path} does not answer: {error}",
                    hint="the server has ended, or SGLang did not load the plugin: its log says why",
                ) from error
        if isinstance(reply, Failed):
            raise WeightSyncError(f"rank {self.rank}: {reply.message}", hint=reply.hint, trace=reply.trace)
        if not isinstance(reply, kind):
            raise EngineError(f"rank {self.rank}: expected {kind.__name__} as an answer, got {type(reply).__name__}")
        return reply

    async def _exchange(self, request: Request) -> Reply:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._path)
        reader, writer = self._streams
        writer.write(frame(request))
        await writer.drain()
        header = await reader.readexactly(4)
        return decode_reply(await reader.readexactly(frame_length(header)))
