"""One request on its way through an SGLang server.

Its completions are asked for together, in one HTTP request, which costs SGLang's front end a fraction of one for each and brings them to
its scheduler at once. Where chunks are wanted as they come, or answers may be long, each completion has a task and a request of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from enum import Enum
from typing import Any

from streamrl.engines.handover import Handover
from streamrl.engines.lost import Lost
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.sglang.answers import Row, Style, aborted, body_of, group_body, joined, must_cut
from streamrl.engines.sglang.client import SglangClient
from streamrl.engines.sglang.counts import Counts
from streamrl.engines.texts import Decode
from streamrl.errors import EngineError, EngineUnavailable, StreamRLError
from streamrl.schemas.versions import Version

GROUPED_TOKENS = 1024
"""Most new tokens of completions that are asked for together. Until the last of them has ended the others count as running: of long ones
that would be for long, and the cost of a request is little beside theirs."""
ABORT_S = 10.0
ABORT_AGAIN_S = 0.25
"""SGLang ignores an abort that overtakes its request, so it is said again until the completion has ended."""


class Stage(Enum):
    """Where a completion is."""

    WAITING = "waiting"
    SENT = "sent"
    ENDED = "ended"


class Completion:
    """One completion of a job."""

    def __init__(self, index: int) -> None:
        self.index = index
        # Random and of one length: an abort of SGLang takes all ids that begin with the one it names.
        self.rid = secrets.token_hex(16)
        self.stage = Stage.WAITING
        self.cut = asyncio.Event()
        """Set when it is to end early."""
        self.ended = asyncio.Event()


class Job:
    """A request being served.

    Args:
        request: checked.
        limit: most new tokens of each completion.
        client: of the server.
        style: of the server.
        turn: awaited before anything is sent; gives the version served then.
        counts: of the engine; told everything, also when nobody waits for it any more.
        lost: of the engine; told what nobody gets.
        decode: tokens to text, where the request has stop strings.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        limit: int,
        client: SglangClient,
        style: Style,
        turn: Callable[[Version], Coroutine[Any, Any, Version]],
        counts: Counts,
        lost: Lost,
        decode: Decode | None = None,
    ) -> None:
        self.request = request
        self.queue = Handover(len(request.seeds), stream=request.stream, lost=lost)
        self.completions = tuple(Completion(index) for index in range(len(request.seeds)))
        self._limit = limit
        self._client = client
        self._style = style
        self._turn = turn
        self._counts = counts
        self._decode = decode
        self._tasks: list[asyncio.Task[None]] = []
        self._cutter: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin all completions."""
        self._counts.waiting += len(self.completions)
        self._counts.moved()
        together = len(self.completions) > 1 and self._limit <= GROUPED_TOKENS and not self._streams
        groups = [self.completions] if together else [(completion,) for completion in self.completions]
        self._tasks = [asyncio.create_task(self._run(group)) for group in groups]

    @property
    def _streams(self) -> bool:
        """True where tokens are asked for as they come."""
        return self.request.stream or must_cut(self.request.sampling)

    def cut(self, index: int | None = None) -> None:
        """End completion `index`, or all of them, with what they have."""
        for completion in self.completions if index is None else self.completions[index : index + 1]:
            completion.cut.set()
        if self._cutter is None or self._cutter.done():
            self._cutter = asyncio.create_task(self._say_so())

    async def over(self) -> None:
        """Wait until nothing of it runs any more."""
        await asyncio.gather(*self._tasks, *([self._cutter] if self._cutter else []), return_exceptions=True)

    async def drop(self) -> None:
        """Leave it at once: the server is gone."""
        for task in (*self._tasks, *([self._cutter] if self._cutter else [])):
            task.cancel()
        await self.over()

    def _move(self, completion: Completion, stage: Stage) -> None:
        if completion.stage is Stage.WAITING:
            self._counts.waiting -= 1
        if completion.stage is Stage.SENT:
            self._counts.sent -= 1
        if stage is Stage.SENT:
            self._counts.sent += 1
        completion.stage = stage
        self._counts.moved()

    async def _run(self, group: Sequence[Completion]) -> None:
        try:
            serving = await self._turn_or_cut(group)
            for completion in (one for one in group if serving is None or one.cut.is_set()):
                self.queue.put_nowait(aborted(completion.index, self._style))
                self._move(completion, Stage.ENDED)
            left = [completion for completion in group if completion.stage is Stage.WAITING]
            if serving is not None and left:
                await self._serve(left, serving)
        except StreamRLError as error:
            self.queue.put_nowait(error)
        finally:
            for completion in group:
                self._move(completion, Stage.ENDED)
                completion.ended.set()

    async def _serve(self, group: Sequence[Completion], serving: Version) -> None:
        request, streams = self.request, self._streams
        for completion in group:
            self._move(completion, Stage.SENT)
        rows = [Row(request, completion.index, self._style, serving, self._decode) for completion in group]
        bodies = [
            body_of(request, completion.rid, completion.index, self._style, limit=self._limit, serving=serving, stream=streams)
            for completion in group
        ]
        if len(group) > 1:
            results = await self._client.generate_group(group_body(bodies))
            if len(results) != len(rows):
                raise self._partial()
            for row, result in zip(rows, results, strict=True):
                self._hand_on(row.take(result))
            return
        parts: list[Chunk] = []
        async for chunk in self._chunks(rows[0], bodies[0], streams):
            self._counts.add(chunk, len(request.prompt_ids))
            if request.stream:
                self.queue.put_nowait(chunk)
            parts.append(chunk)
        if not parts or parts[-1].finish_reason is None:
            raise self._partial()
        if not request.stream:
            self.queue.put_nowait(joined(parts))
        if rows[0].cut:
            await self._abort(group[0])

    def _hand_on(self, chunk: Chunk | None) -> None:
        """Hand on a whole completion."""
        if chunk is None or chunk.finish_reason is None:
            raise self._partial()
        self._counts.add(chunk, len(self.request.prompt_ids))
        self.queue.put_nowait(chunk)

    def _partial(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"expected whole completions of {self.request.request_id!r} from SGLang at engine {self._style.engine}, got a part",
            hint="see the server's log",
        )

    async def _chunks(self, row: Row, body: dict[str, Any], streams: bool) -> AsyncIterator[Chunk]:
        if not streams:
            if (chunk := row.take(await self._client.generate(body))) is not None:
                yield chunk
            return
        async with aclosing(self._client.stream(body)) as results:  # type: ignore[type-var]  # it is an async generator
            async for result in results:
                if (chunk := row.take(result)) is not None:
                    yield chunk
                    if chunk.finish_reason is not None:
                        return

    async def _turn_or_cut(self, group: Sequence[Completion]) -> Version | None:
        """The version served when their turn has come; None when all of them are cut before."""

        async def all_cut() -> None:
            for completion in group:
                await completion.cut.wait()

        turn, cut = asyncio.ensure_future(self._turn(self.request.least)), asyncio.ensure_future(all_cut())
        try:
            await asyncio.wait((turn, cut), return_when=asyncio.FIRST_COMPLETED)
            return None if cut.done() else turn.result()
        finally:
            turn.cancel()
            cut.cancel()
            await asyncio.gather(turn, cut, return_exceptions=True)

    async def _abort(self, completion: Completion) -> None:
        body = {"rid": completion.rid}
        with contextlib.suppress(EngineError):
            # A server that does not answer is looked after by its watch.
            await self._client.command("/abort_request", body, timeout_s=ABORT_S)

    async def _say_so(self) -> None:
        """Abort at the server what is to be cut, until all of it has ended."""
        while pending := [one for one in self.completions if one.cut.is_set() and not one.ended.is_set()]:
            for completion in pending:
                if completion.stage is Stage.SENT:
                    await self._abort(completion)
            waits = [asyncio.ensure_future(one.ended.wait()) for one in pending]
            await asyncio.wait(waits, timeout=ABORT_AGAIN_S)
            for wait in waits:
                wait.cancel()
