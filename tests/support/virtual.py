"""An event loop whose clock is virtual: it jumps to the next timer whenever nothing else is left to do.

A test of hours takes milliseconds, and what waits for ever fails at once. `time.monotonic` and `time.time` tell the same clock, threads
that are asked for run in the loop's own, and nothing outside the test can wake it.
"""

import asyncio
import contextlib
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import patch

BEGINS_S = 1000.0
UNIX_S = 1_700_000_000.0
"""The time of day at which the clock begins."""
LONGEST_S = 20_000.0
"""A test that is not over by then waits for something that does not come."""


class Stuck(Exception):
    """Nothing is left that could go on."""


class _Jumps(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = BEGINS_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if (ready := super().select(0)) or timeout == 0:
            return ready
        if timeout is None or self.now_s > BEGINS_S + LONGEST_S:
            raise Stuck(f"nothing is left to wait for at {self.now_s - BEGINS_S:g} s")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, Any]) -> Any:
    loop = VirtualLoop()
    with patch.object(time, "monotonic", loop.time), patch.object(time, "time", lambda: UNIX_S + loop.time() - BEGINS_S):
        try:
            return loop.run_until_complete(main)
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            with contextlib.suppress(Stuck):
                if left:
                    loop.run_until_complete(asyncio.wait(left))
            with contextlib.suppress(Stuck):
                loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test under the virtual clock; its fixtures are plain ones."""

    @functools.wraps(test)
    def running(*args: Any, **named: Any) -> None:
        run(test(*args, **named))

    return running


async def elapse(seconds: float) -> None:
    assert isinstance(asyncio.get_running_loop(), VirtualLoop), "elsewhere it would be a sleep"
    await asyncio.sleep(seconds)


def at() -> float:
    return round(asyncio.get_running_loop().time() - BEGINS_S, 6)
