"""What user code asks for in a child, and the parent does: engine requests, checkpoints."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from streamrl.engines.protocol import Chunk, EngineInfo, GenerateRequest
from streamrl.errors import EngineError
from streamrl.producers.children import frames
from streamrl.producers.children.calls import NO_TOKENS
from streamrl.producers.episode import Segment

T = TypeVar("T")


class Heard:
    """A turn as the child knows it."""

    def __init__(self, segment: Segment = NO_TOKENS) -> None:
        self.token_ids = list(segment.token_ids)
        self.logprobs = list(segment.logprobs)
        self.spans = list(segment.spans)
        self.temperature = segment.temperature
        self.sampling = segment.sampling


class Asking:
    """One call's questions to the parent. It is the `Engine` of the call's context.

    Args:
        call: its number.
        send: a frame to the parent.
        turns: what the parent has recorded for it before.
    """

    def __init__(self, call: int, send: Callable[[frames.Said], None], turns: Sequence[Segment]) -> None:
        self.call = call
        self.task = 0
        self.rollout: int | None = None
        self.cancelled = False
        """Whether the parent has ended it."""
        self.disturbed_by: int | None = None
        """The call whose user code has cancelled a task of this one."""
        self.turns = [Heard(turn) for turn in turns]
        self._send = send
        self._has_begun = False
        self._requests: dict[int, asyncio.Queue[Chunk | BaseException | None]] = {}
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[frames.Answer]] = {}

    def began(self) -> None:
        """Its clock runs from now on. From any thread."""
        if not self._has_begun:
            self._has_begun = True
            self._send(frames.Began(self.call))

    def waits_for_slot(self, begins: bool) -> None:
        """A program waits for its turn in the sandbox, or no longer; its clock then stands. From any thread."""
        self._send(frames.Waits(self.call, begins))

    def cancel(self) -> None:
        """The parent has ended the call: it answers nothing any more, which plain functions that wait for an answer must hear of."""
        self.cancelled = True
        for request in self._requests.values():
            request.put_nowait(asyncio.CancelledError())
        for answer in self._answers.values():
            answer.cancel()

    def heard(self, frame: frames.Given | frames.Answer) -> None:
        """The parent's answer."""
        if isinstance(frame, frames.Answer):
            answer = self._answers.pop(frame.number, None)
            if answer is not None and not answer.done():
                answer.set_result(frame)
            return
        if frame.chunk is not None:
            turn = self.turns[frame.turn + frame.chunk.completion]
            turn.token_ids += frame.chunk.token_ids
            turn.logprobs += frame.chunk.logprobs
            turn.spans += frame.chunk.spans
        if (request := self._requests.get(frame.turn)) is not None:
            request.put_nowait(frame.problem.error() if frame.problem is not None else frame.chunk)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """As `Engine.generate`; the parent asks its engines, and records what they give."""
        if self.cancelled:
            raise asyncio.CancelledError
        turn = len(self.turns)
        arrived = self._requests[turn] = asyncio.Queue()
        self.turns += [Heard(Segment((), temperature=request.sampling.temperature, sampling=request.sampling)) for _ in request.seeds]
        ended = False
        try:
            self._send(frames.Ask(self.call, turn, request))
            while (item := await arrived.get()) is not None:
                if isinstance(item, BaseException):
                    ended = True
                    raise item
                yield item
            ended = True
        finally:
            del self._requests[turn]
            if not ended:
                self._send(frames.Hush(self.call, turn))

    async def abort(self, request_id: str) -> None:
        await self._answered(lambda number: frames.Abort(self.call, number, request_id))

    async def info(self) -> EngineInfo:
        info = (await self._answered(lambda number: frames.Info(self.call, number))).info
        if info is None:
            raise EngineError("expected an engine's state, got none")
        return info

    async def image(self, place: int) -> bytes:
        """As `Context.images`."""
        image = (await self._answered(lambda number: frames.Look(self.call, number, place))).image
        if image is None:
            raise EngineError("expected an image, got none")
        return image

    async def store(self, rollout: int, data: bytes) -> None:
        """As `Context.store`."""
        await self._answered(lambda number: frames.Save(self.call, number, rollout, data))

    async def _answered(self, question: Callable[[int], frames.Said]) -> frames.Answer:
        if self.cancelled:
            raise asyncio.CancelledError
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(question(number))
        got = await answer
        if got.problem is not None:
            raise got.problem.error()
        return got


current: contextvars.ContextVar[Asking | None] = contextvars.ContextVar("current", default=None)
"""The call that the running code belongs to."""


def begun(function: Callable[[], T]) -> Callable[[], T]:
    """The function as the running call's: its clock runs from when it begins, and it does not begin once the call has been cancelled."""
    asking = current.get()

    def work() -> T:
        if asking is not None:
            asking.began()
            if asking.cancelled:
                raise asyncio.CancelledError
        return function()

    return work


async def in_thread(function: Callable[[], T]) -> T:
    """Run a plain function of the user's in a thread; a call that is cancelled goes on until the function has returned.

    So a function that never returns is known: its process is killed. Without a thread to run in it waits, and its clock stands.
    """
    future = asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, begun(function))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
