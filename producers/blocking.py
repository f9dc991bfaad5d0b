"""The engine and its chats for plain functions (`def`), which run in a thread: what is awaited elsewhere returns here.

```python
def producer(task, engine):
    chat = engine.chat(task)
    turn = chat.generate()          # no await
    time.sleep(1)                   # may block: the other rollouts go on
    return chat.episode()
```
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from streamrl.producers.chat import Chat
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.producers.tool_runs import Tool, ToolResult
from streamrl.producers.turns import Turn
from streamrl.schemas.tasks import RolloutTask, Sampling

T = TypeVar("T")


class BlockingEngine:
    """A `RolloutEngine` whose chats block; used from one thread that is not the loop's.

    Args:
        engine: of the rollout.
        loop: where its coroutines run.
    """

    def __init__(self, engine: RolloutEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def chat(
        self,
        prompt: RolloutTask | str | Sequence[Any],
        *,
        sampling: Sampling | None = None,
        tools: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> BlockingChat:
        """As `RolloutEngine.chat`."""
        chat = self._engine.chat(prompt, sampling=sampling, tools=tools, template_kwargs=template_kwargs)
        return BlockingChat(chat, self._loop)

    def image(self, place: int = 0) -> bytes:
        """As `RolloutEngine.image`."""
        return _wait(self._engine.image(place), self._loop)

    def checkpoint(self, data: bytes) -> None:
        """As `Context.checkpoint`."""
        _wait(self._engine.context.checkpoint(data), self._loop)


class BlockingChat:
    """A `Chat` whose `generate`, `save` and `call_tools` return when they are done; everything else is the chat's own."""

    def __init__(self, chat: Chat, loop: asyncio.AbstractEventLoop) -> None:
        self._chat = chat
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chat, name)

    def generate(
        self, *, max_new_tokens: int | None = None, temperature: float | None = None, sampling: Mapping[str, Any] | None = None
    ) -> Turn:
        """As `Chat.generate`."""
        return _wait(self._chat.generate(max_new_tokens=max_new_tokens, temperature=temperature, sampling=sampling), self._loop)

    def save(self, state: Any = None) -> None:
        """As `Chat.save`."""
        _wait(self._chat.save(state), self._loop)

    def call_tools(
        self, tools: Mapping[str, Tool], *, timeout_s: float = 10.0, retries: int = 0, fail: bool = False, max_chars: int = 20_000
    ) -> list[ToolResult]:
        """As `Chat.call_tools`."""
        work = self._chat.call_tools(tools, timeout_s=timeout_s, retries=retries, fail=fail, max_chars=max_chars)
        return _wait(work, self._loop)

    def branch(self, *, keep: int | None = None) -> BlockingChat:
        """As `Chat.branch`."""
        return BlockingChat(self._chat.branch(keep=keep), self._loop)

    def compact(self, summary: str, *, keep: int = 0) -> BlockingChat:
        """As `Chat.compact`."""
        return BlockingChat(self._chat.compact(summary, keep=keep), self._loop)


def _wait(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    try:
        return asyncio.run_coroutine_threadsafe(work, loop).result()
    except concurrent.futures.CancelledError:
        # Not an Exception here, as in a coroutine: what catches every error must not go on with a rollout that has been ended.
        raise asyncio.CancelledError from None
