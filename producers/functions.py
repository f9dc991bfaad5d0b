"""Custom producers: an async function of a task and an engine, lifted to a `Producer`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from streamrl.config.plugins import resolve
from streamrl.errors import ConfigError, EngineError
from streamrl.producers.chat import RolloutEngine
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.episode import Episode
from streamrl.producers.protocol import Context, Failure, Producer
from streamrl.producers.single_turn import SingleTurn
from streamrl.schemas.tasks import RolloutTask

Given = Episode | Sequence[Episode] | None
"""What a custom producer may return: one episode, several that share the rollout's reward, or None to give the rollout up."""


class FunctionProducer:
    """Calls the function once per rollout, all rollouts of a task at the same time.

    What the function raises fails its rollout alone; EngineError gives the whole task back.
    """

    def __init__(self, function: Callable[[RolloutTask, RolloutEngine], Awaitable[Given]]) -> None:
        self._function = function

    async def rollout(self, task: RolloutTask, context: Context) -> Sequence[Episode | Failure]:
        """The episodes and failures of all rollouts, in their order."""
        format = ChatFormat(context.tokenizer, chat_template=context.chat_template)
        try:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(self._one(task, context.for_rollout(k), format)) for k in range(task.num_rollouts)]
        except* EngineError as errors:
            raise errors.exceptions[0] from None
        return [item for call in calls for item in call.result()]

    async def _one(self, task: RolloutTask, context: Context, format: ChatFormat) -> Sequence[Episode | Failure]:
        rollout = context.rollout_index
        try:
            given = await self._function(task, RolloutEngine(context, format))
            episodes = _episodes(given)
        except EngineError:
            raise
        except Exception as error:  # written policy: an error in user code ends its rollout as a tombstone, never the worker
            context.log.warning(
                "event=rollout_failed task=%d rollout=%d error=%s", task.index, rollout, type(error).__name__, exc_info=error
            )
            return [Failure(rollout, "failed", f"{type(error).__name__}: {error}")]
        for episode in episodes:
            episode.rollout = rollout
        return episodes or [Failure(rollout, "filtered", "the producer returned no episode")]


def _episodes(given: Any) -> Sequence[Episode]:
    if given is None:
        return ()
    if isinstance(given, Episode):
        return [given]
    if isinstance(given, Sequence) and all(isinstance(episode, Episode) for episode in given):
        return given
    raise TypeError(f"expected an Episode, a list of them or None, got {type(given).__name__}; end it with `return chat.episode()`")


def make_producer(reference: str, *, key: str = "producer.function", base: Path | None = None) -> Producer:
    """Build the producer that `reference` names.

    `single_turn`, or user code: an async function of (task, engine); a class or an object with `async rollout(task, context)`.

    Raises:
        ConfigError: it cannot be found or is none of these.
    """
    if reference == "single_turn":
        return SingleTurn()
    if not any(mark in reference for mark in ".:"):
        raise ConfigError(f"{key} must be single_turn or name user code, got {reference!r}", hint="write it as file.py:name", key=key)
    found: Any = resolve(reference, what="producer", key=key, base=base)
    made: Any = found() if inspect.isclass(found) else found
    if inspect.iscoroutinefunction(getattr(made, "rollout", None)):
        return made
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"{key} = {reference!r} must be an async function of (task, engine), got {_describe(found)}",
            hint="write `async def name(task, engine): ... return chat.episode()`",
            key=key,
        )
    signature = inspect.signature(found)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{key} = {reference!r} must take (task, engine), it takes {signature}", hint="options come as engine.options", key=key
        ) from error
    return FunctionProducer(found)


def is_user_code(producer: Producer) -> bool:
    """Whether it may block, and so runs in the thread for user code."""
    return not isinstance(producer, SingleTurn)


def _describe(found: Any) -> str:
    return f"the plain function {found.__name__}" if inspect.isfunction(found) else f"a {type(found).__name__}"
