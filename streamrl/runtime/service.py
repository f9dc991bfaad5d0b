"""The life of a service: exit codes, the order of shutdown, and what happens when the parent dies. Written once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator
from enum import IntEnum
from types import FrameType

from streamrl.system import death_signal


class Exit(IntEnum):
    """How a worker process ended; the supervisor reads it."""

    DONE = 0
    """Its `main` has returned. A process can end so for any reason: only the log says whether work is over."""
    FAILED = 1
    """An error; worth a restart."""
    CONFIG = 2
    """The configuration is wrong, or somebody has to decide how to go on; a restart would fail in the same way."""
    FENCED = 3
    """Another worker has this role; a restart would fight it."""
    DIVERGED = 4
    """The weights diverged; a restart would train them to the same end."""
    DRAINED = 5
    """A worker of a supervisor was told by a signal to drain, and has."""


SHUTDOWN_ORDER: tuple[tuple[str, ...], ...] = (
    ("trainer",),
    ("producer", "gateway"),
    ("rewarder", "evaluator"),
    ("engine",),
    ("feeder",),
)
"""Kinds of worker in the order in which they stop; the bus stops after all of them.

The trainer first: its last checkpoint and position need only the bus. Then producers, which give their open tasks back and may wait for
an engine's answer to an abort; then rewarders, of whom nobody asks rewards any more, and the evaluator, which may still ask the engines;
nobody asks them after that.
"""

SUPERVISOR_VARIABLE = "STREAMRL_SUPERVISOR"
"""Process id of the supervisor, in the environment of the workers it starts."""

_LOOK_S = 1.0

STACKS_SIGNAL = signal.SIGUSR1
"""Has a worker write the stacks of all its threads to its log."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as `parent` dies, however it dies; ends it now if that has happened already.

    Elsewhere than on Linux a thread looks every second.
    """
    ask = death_signal(signal.SIGKILL)
    if ask is not None and (code := ask()):
        raise OSError(code, os.strerror(code))
    _end_without(parent)  # it may have died between the fork and the prctl call: then no signal will ever come
    if ask is None:

        def watch() -> None:
            while True:
                time.sleep(_LOOK_S)
                _end_without(parent)

        threading.Thread(target=watch, name="parent", daemon=True).start()


def _end_without(parent: int) -> None:
    if os.getppid() != parent:  # this process has been handed to another one
        os._exit(Exit.FAILED)


@contextlib.contextmanager
def stops_at_once() -> Generator[None]:
    """While open, SIGTERM and SIGINT end this process with the exit code of a worker that has drained.

    It is for a worker that starts: it holds nothing yet, and its imports and the wait for its bus may take long.
    """
    code = Exit.DRAINED if SUPERVISOR_VARIABLE in os.environ else Exit.DONE

    def leave(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe_exit(code: int) -> str:
    """`exit code 1`, or the signal that ended it."""
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
