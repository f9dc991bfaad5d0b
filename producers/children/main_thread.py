"""Plain functions in a process's main thread, where a signal can end them, and what calls leave behind in a process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.producers.children.remote import begun

END_SIGNAL = signal.SIGUSR2
"""Ends the function that runs. SIGALRM is left to the user's code."""
_THREADS, _PROCESSES = 32, 16
"""More than these that calls have left behind, and the process is to be replaced."""
_COUNTS_EVERY_S = 0.1

_Job = tuple[contextvars.Context, Callable[[], Any], "concurrent.futures.Future[Any]"]


class MainThread:
    """Runs functions one after the other in the thread that `serve` is called in, which has to be the main one."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._runs = False
        self._thread = 0

    def listen(self) -> None:
        """Have the signal end what runs, and nothing else; in the main thread."""
        self._thread = threading.get_ident()
        signal.signal(END_SIGNAL, self._end)

    @property
    def is_free(self) -> bool:
        """It runs nothing now."""
        return not self._runs and self._jobs.empty()

    async def run(self, function: Callable[[], Any]) -> Any:
        """What the function gives or raises. Cancelled, it returns once the function has ended."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._jobs.put((contextvars.copy_context(), begun(function), future))
        ended = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            # The parent's signal may have come before the function had begun. Nothing else runs there until this thread has said its end.
            if not ended.done():
                signal.pthread_kill(self._thread, END_SIGNAL)
            await asyncio.wait([ended])
            if not ended.cancelled():
                ended.exception()  # seen: it is nobody's any more
            raise

    def serve(self) -> None:
        """Run what `run` is given; never returns."""
        home, own = os.getcwd(), os.getpid()
        while True:
            self._reset(home)
            context, function, future = self._jobs.get()
            given, error = None, None
            try:
                self._runs = True
                try:
                    given = context.run(function)
                finally:
                    self._runs = False
            except BaseException as raised:  # the signal may strike in the last line, too
                error = raised
            self._runs = False
            if os.getpid() != own:  # the function has forked, and this is the copy
                os._exit(0)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(given)
            del context, function, future, given, error

    def _reset(self, home: str) -> None:
        """Undo what a call may have changed for those after it."""
        with contextlib.suppress(OSError):
            os.chdir(home)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.listen()

    def _end(self, *_: object) -> None:
        if self._runs:
            self._runs = False  # once: a second signal would cut off what the function cleans up
            raise asyncio.CancelledError


class Wear:
    """What calls leave behind in this process; made before the first of them."""

    def __init__(self) -> None:
        self._threads = threading.active_count()
        self._processes = _num_processes()
        self._counted_s = -_COUNTS_EVERY_S
        """When processes were counted last: that takes longer than many a grader."""

    def tell(self, error: BaseException | None) -> str:
        """What a call that has ended, with this error, leaves behind that calls for another process; empty: not enough for that."""
        if isinstance(error, MemoryError):
            return "memory"
        if (threads := threading.active_count() - self._threads) > _THREADS:
            return f"{threads} threads"
        if (now_s := time.monotonic()) - self._counted_s >= _COUNTS_EVERY_S:
            self._counted_s = now_s
            if (processes := _num_processes() - self._processes) > _PROCESSES:
                return f"{processes} processes"
        return ""


def _num_processes() -> int:
    """Processes that this one has started and that are not over; 0 where the kernel does not say."""
    found = 0
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += len(children.read_bytes().split())
    return found
