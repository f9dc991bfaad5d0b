"""A thread with an event loop of its own for user code, so that code which blocks stops no heartbeat, no other request and no lease.

```text
worker's loop: bus, heartbeats, HTTP to engines          user's loop: custom producers and rewards
        | run(function) --------------------------------------> |
        | <------------------------- engine.generate(request)   |
        | chunks -----------------------------------------------> |
```
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from streamrl.engines.protocol import Chunk, Engine, EngineInfo, GenerateRequest
from streamrl.errors import EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class UserThread:
    """Runs coroutines in its own loop; a daemon, so code that never returns cannot keep the process alive.

    A lease is lost only if user code holds the interpreter lock for longer than the ack wait; the task is then rolled out twice and
    the first result counts.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="user-code", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def run(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Await `function(*args)` in the thread; cancelling this cancels it at its next await, without waiting for that."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(*args), self._loop))

    async def close(self, *, wait_s: float = 1.0) -> None:
        """Cancel what runs and end the thread; one that is blocked for longer than `wait_s` is left behind, and said so."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, wait_s)
        if self._thread.is_alive():
            logger.warning("event=user_code_blocked wait_s=%.1f action=left_behind", wait_s)


class HomeCall:
    """An async function of the worker's loop, to be called in the loop of a `UserThread`."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, T]], home: asyncio.AbstractEventLoop) -> None:
        self._function = function
        self._home = home

    async def __call__(self, *args: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._function(*args), self._home))


class ThreadEngine:
    """An engine of the worker's loop, to be used in the loop of a `UserThread`."""

    def __init__(self, engine: Engine, home: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._home = home

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """As `Engine.generate`; at most one request's chunks are buffered."""
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()

        async def pump() -> None:
            end: BaseException | None = None
            try:
                async with aclosing(self._engine.generate(request)) as stream:  # type: ignore[type-var]
                    async for chunk in stream:
                        here.call_soon_threadsafe(arrived.put_nowait, chunk)
            except asyncio.CancelledError:
                end = EngineError(f"request {request.request_id} was cancelled because the worker stops")
                raise
            except Exception as error:  # carried over to the caller's thread, where it is raised
                end = error
            finally:
                if not here.is_closed():
                    here.call_soon_threadsafe(arrived.put_nowait, end)

        future = asyncio.run_coroutine_threadsafe(pump(), self._home)
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    async def abort(self, request_id: str) -> None:
        await self._call(self._engine.abort(request_id))

    async def info(self) -> EngineInfo:
        return await self._call(self._engine.info())

    async def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._home))
