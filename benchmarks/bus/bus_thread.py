"""A bus for callers without an event loop: it runs on a thread and a loop of its own, so that no computation delays its heartbeats."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar, cast

from streamrl.bus.protocol import Bus

T = TypeVar("T")


class BusThread:
    """Runs bus operations for other threads. Use as a context manager; leaving it closes the bus and ends the thread.

    Args:
        connect: makes the bus, on the thread's loop: `lambda: streamrl.bus.connect(address, run, config)`.

    Raises:
        BusError: from `__enter__`, whatever `connect` raised.
    """

    def __init__(self, connect: Callable[[], Awaitable[Bus]]) -> None:
        self._connect = connect
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="bus", daemon=True)
        self._bus: Bus | None = None

    def __enter__(self) -> BusThread:
        self._thread.start()
        try:
            self._bus = self._wait(self._open())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._bus is not None:
                self._wait(self._bus.close())
        finally:
            self._end()

    def submit(self, work: Callable[[Bus], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Begin an operation, such as `lambda bus: bus.publish(subject, body)`; the future gives its result or raises its error."""
        if self._bus is None:
            raise RuntimeError("BusThread is used outside its `with` block")
        return asyncio.run_coroutine_threadsafe(work(self._bus), self._loop)

    def run(self, work: Callable[[Bus], Coroutine[Any, Any, T]]) -> T:
        """Do an operation and wait for its result."""
        return self.submit(work).result()

    def iterate(self, source: Callable[[Bus], AsyncIterator[T]]) -> Iterator[T]:
        """Items of `lambda bus: bus.read(...)` one by one; blocks until the next one is there. Closing the iterator ends the read."""
        items = self.run(lambda bus: _made(source, bus))
        try:
            while True:
                try:
                    item = self.run(lambda bus: _next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self.run(lambda bus: cast(AsyncGenerator[T, None], items).aclose())

    async def _open(self) -> Bus:
        return await self._connect()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _made(source: Callable[[Bus], AsyncIterator[T]], bus: Bus) -> AsyncIterator[T]:
    return source(bus)


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)
