"""Guards a child's calls from each other: their tasks, which nobody else cancels unseen, and a canary call.

User code may break the interpreter that it shares with other calls (`asyncio.Queue = None`). The canary is a call of streamrl's own, whose
outcome is known: when it fails, so may any other call, for a reason that is not its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from streamrl.engines.protocol import Chunk
from streamrl.producers.children import frames
from streamrl.producers.children.remote import Asking, current
from streamrl.producers.children.returned import settled, valued
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.functions import FunctionProducer, InThread, describe
from streamrl.producers.protocol import Context
from streamrl.rewards.functions import FunctionReward, as_value
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version

if TYPE_CHECKING:
    from streamrl.producers.protocol import Tokenizer

_TASK = RolloutTask(run="canary", index=0, source="main", prompt_ids=(1,), label="")
_TURN = Chunk(completion=0, token_ids=(2,), logprobs=(-0.5,), spans=(VersionSpan(1, Version(0, 0)),), finish_reason="stop")
_TIMER_S = 0.001
"""Long enough that a clock which stands still is noticed."""
_EPISODE = Episode(segments=(Segment((1,)), Segment(_TURN.token_ids, _TURN.logprobs, _TURN.spans)), turns=("7",), finish_reason="stop")
_PARTS, _ANSWER = {"first": 0.25, "second": 0.25}, "7"
_silent = logging.getLogger(f"{__name__}.silent")
_silent.disabled = True


class OwnTask(asyncio.Task[Any]):
    """A task of a call: its own one, or one that its user code has made.

    Args:
        work: what it runs.
        asking: the call.
        is_call: it is the call's own one, which nobody cancels but the call and the parent.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], *, asking: Asking, is_call: bool = False, **options: Any) -> None:
        self.asking = asking
        self._is_call = is_call
        super().__init__(work, **options)

    def cancel(self, msg: Any | None = None) -> bool:
        by = current.get()
        if by is not self.asking and not self.asking.cancelled:
            if self._is_call:
                return False
            if by is not None:
                self.asking.disturbed_by = by.call
        return super().cancel(msg)


class Canary:
    """Runs canary calls, in the same way as calls of the user's code are run.

    Args:
        tokenizer: of the policy; None: there is no producer here.
        plain: whether the producer is a plain function, for which a thread is needed.
        scores: whether there is a reward here.
    """

    def __init__(self, *, tokenizer: Tokenizer | None, plain: bool, scores: bool) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="canary") if plain else None
        self._scores = scores
        self._producer = FunctionProducer(_plain, in_thread=self._in_thread) if plain else FunctionProducer(_async)

    async def sing(self, in_main_thread: InThread | None = None) -> str:
        """Why calls may fail that are not to blame; empty: they do not.

        Args:
            in_main_thread: runs a plain function as those of the reward are run; None: they are async, or one of them runs now.
        """
        asking = current.get()
        current.set(None)
        try:
            await asyncio.sleep(_TIMER_S)
            if self._tokenizer is not None:
                await self._roll_out(self._tokenizer)
            if self._scores:
                await self._score(in_main_thread)
        except BaseException as error:  # whatever it is, the canary has not done it
            return f"user code has broken its process, in which now a call that does nothing fails: {describe(error)}"
        finally:
            current.set(asking)
        return ""

    def misjudges(self) -> str:
        """Why a reward that was given now may be another one; empty: it is not. At once, so that it may be asked for each."""
        try:
            value = valued(0, [as_value(_PARTS)], 1).values[0]
            same = value.value == 0.5 and value.parts == _PARTS and _EPISODE.completion == _ANSWER
        except BaseException as error:
            return f"user code has broken its process, in which now no reward can be given: {describe(error)}"
        return "" if same else "user code has changed what rewards are made of in its process"

    async def _roll_out(self, tokenizer: Tokenizer) -> None:
        loop = asyncio.get_running_loop()

        def send(frame: frames.Said) -> None:
            frames.checked(frame)
            if isinstance(frame, frames.Ask):
                loop.call_soon(asking.heard, frames.Given(0, frame.turn, chunk=_TURN))
                loop.call_soon(asking.heard, frames.Given(0, frame.turn))

        asking = Asking(0, send, ())
        context = Context(engine=asking, tokenizer=tokenizer, task=_TASK, seed=0, log=_silent, chat_template=False)
        ended = settled(asking, await self._producer.one(_TASK, context), [0])
        if ended.failures:
            raise RuntimeError(ended.failures[0].detail)
        frames.checked(ended)

    async def _score(self, in_main_thread: InThread | None) -> None:
        given = await FunctionReward(_graded, {}, in_thread=in_main_thread).score(_TASK, [_EPISODE])
        scored = valued(0, given, 1)
        frames.checked(scored)
        if [value.value for value in scored.values] != [0.5]:
            raise RuntimeError(scored.error or scored.values[0].error or "a reward of 0.5 became another")

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, contextvars.copy_context().run, function)


async def _async(task: RolloutTask, engine: Any) -> Any:
    chat = engine.chat(task)
    await chat.generate()
    return chat.episode()


def _plain(task: RolloutTask, engine: Any) -> Any:
    chat = engine.chat(task)
    chat.generate()
    return chat.episode()


def _graded(task: RolloutTask, episode: Any) -> float:
    return 0.5
