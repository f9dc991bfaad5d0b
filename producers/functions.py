"""Custom producers: a function of a task and an engine, async or plain, lifted to a `Producer`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from streamrl.config.bridges import bridge_of, function_of, split
from streamrl.config.plugins import Form, check_form, resolve
from streamrl.errors import ConfigError, EngineError, StreamRLError
from streamrl.producers.blocking import BlockingEngine
from streamrl.producers.branches import branched
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.episode import Episode
from streamrl.producers.places import line_of
from streamrl.producers.protocol import Context, Failure, Producer
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.producers.single_turn import SingleTurn
from streamrl.schemas.tasks import RolloutTask

SINGLE_TURN = "single_turn"
"""`producer.function` of the built-in producer."""
PRODUCER = Form(
    key="producer.function",
    what="producer",
    takes=("task", "engine"),
    hint="write `async def name(task, engine): ... return chat.episode()`; options come as engine.options",
    method="rollout",
)
DETAIL_LENGTH = 1000
"""What a failure says is cut here."""
NOTHING = 'the producer returned nothing: end it with `return chat.episode()`, or with `return Failure(0, "filtered", why)` to give it up'
Given = Episode | Sequence[Episode] | Failure
"""What a custom producer may return: one episode, several that share the rollout's reward, or a failure in the rollout's place."""


InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a plain function somewhere else than in the event loop."""


class FunctionProducer:
    """Calls the function once per rollout. What it raises fails its rollout alone; EngineError passes.

    Args:
        function: async, or plain.
        in_thread: runs a plain one.
    """

    def __init__(self, function: Callable[..., Any], *, in_thread: InThread = asyncio.to_thread) -> None:
        self._function = function
        self._in_thread = in_thread
        self.plain = not is_async(function)
        """Whether it runs in a thread, with an engine that blocks."""

    async def rollout(self, task: RolloutTask, context: Context) -> Sequence[Episode | Failure]:
        """The episodes and failures of all rollouts, in their order; all rollouts at the same time."""
        try:
            async with asyncio.TaskGroup() as group:
                contexts = [context.for_rollout(k) for k in range(task.num_rollouts)]
                calls = [group.create_task(self.one(one.task, one)) for one in contexts]
        except* EngineError as errors:
            raise errors.exceptions[0] from None
        return [item for call in calls for item in call.result()]

    async def one(self, task: RolloutTask, context: Context) -> Sequence[Episode | Failure]:
        """The episodes of one rollout, or its failure; raises EngineError."""
        rollout = context.rollout_index
        engine = RolloutEngine(context, ChatFormat(context.tokenizer, chat_template=context.chat_template))
        try:
            if self.plain:
                blocking = BlockingEngine(engine, asyncio.get_running_loop())
                given = await self._in_thread(lambda: self._function(task, blocking))
            else:
                given = await self._function(task, engine)
            if isinstance(given, Failure):
                return [replace(given, rollout=rollout)]
            episodes = branched(_episodes(given))
        except EngineError:
            raise
        except Exception as error:  # written policy: an error in user code ends its rollout as a tombstone, never the worker
            context.log.warning("event=rollout_failed error=%s", type(error).__name__, exc_info=error)
            return [Failure(rollout, "failed", describe(error))]
        for episode in episodes:
            episode.rollout = rollout
        return episodes or [Failure(rollout, "failed", NOTHING)]


def describe(error: BaseException) -> str:
    """An error in a line: its class, its text, and the line of the user's code. `sys.exit(3)` is `SystemExit: 3 in reward.py:7`."""
    where = f" in {line}" if (line := line_of(error)) else ""
    try:
        text = error.message if isinstance(error, StreamRLError) else str(error)
    except Exception as worse:  # the user's own class of errors
        text = f"its text cannot be had: {type(worse).__name__}"
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return said[: DETAIL_LENGTH - len(where)] + where


def _episodes(given: Any) -> Sequence[Episode]:
    if given is None:
        return ()
    if isinstance(given, Episode):
        return [given]
    if isinstance(given, Sequence) and all(isinstance(episode, Episode) for episode in given):
        return given
    raise TypeError(f"expected an Episode, or a list of them, got {type(given).__name__}; end it with `return chat.episode()`")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def make_producer(
    reference: str, *, key: str = PRODUCER.key, base: Path | None = None, in_thread: InThread = asyncio.to_thread
) -> Producer:
    """Build the producer that `reference` names.

    `single_turn`; an environment of another library (`streamrl.config.bridges`); or user code: a function of (task, engine), async
    or plain; a class or an object with `async rollout(task, context)`. `in_thread` runs plain functions.

    Raises:
        ConfigError: it cannot be found or is none of these.
    """
    if reference == SINGLE_TURN:
        return SingleTurn()
    if not any(mark in reference for mark in ".:"):
        raise ConfigError(f"{key} must be single_turn or name user code, got {reference!r}", hint="write it as file.py:name", key=key)
    if (bridge := bridge_of(reference)) and bridge.producer:
        _, name = split(reference)
        return FunctionProducer(function_of(bridge.producer)(name), in_thread=in_thread)
    form = replace(PRODUCER, key=key)
    found: Any = resolve(reference, what=form.what, key=key, base=base)
    check_form(form, reference, found)
    made: Any = found() if inspect.isclass(found) else found
    if hasattr(made, "rollout"):
        return made
    return FunctionProducer(found, in_thread=in_thread)


def is_user_code(reference: str) -> bool:
    """Whether `make_producer` would load the user's code for it."""
    return reference != SINGLE_TURN
