"""One supervisor per run: a lock on the run directory that the kernel frees when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from typing import NamedTuple

from streamrl.errors import LaunchError
from streamrl.runtime.processes import started
from streamrl.runtime.rundir import RunDir, unreadable

_GLANCE_S = 1.0
"""Who only looks (`holder`) has the lock for an instant; a start waits so long for those, and for a name of who else has it."""
_POLL_S = 0.01


class Holder(NamedTuple):
    """Who has a run's lock."""

    pid: int
    """0: not known, it has not written itself down yet."""
    began: str
    """See `streamrl.runtime.processes.started`."""


@contextlib.contextmanager
def lock_run(run: RunDir) -> Generator[None]:
    """Hold the run's lock.

    Raises:
        LaunchError: somebody else has it; names the process id.
        ConfigError: the lock file cannot be opened.
    """
    try:
        descriptor = os.open(run.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unreadable(run, error) from error
    try:
        _take(descriptor, run)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {started(os.getpid())}".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)  # this process may live on without the lock
    finally:
        os.close(descriptor)


def _take(descriptor: int, run: RunDir) -> None:
    deadline = time.monotonic() + _GLANCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            found = _read(descriptor)
            if found.pid or time.monotonic() > deadline:
                raise LaunchError(
                    f"run {run.name!r} is running already, supervised by process {found.pid or '(unknown)'}",
                    hint=f"look at it with `streamrl status {run.name}`, stop it with `streamrl down {run.name}`, or choose another --name",
                    pid=found.pid,
                ) from error
            time.sleep(_POLL_S)
        else:
            return


def holder(run: RunDir) -> Holder | None:
    """The run's supervisor, or None if it is not running; raises ConfigError where the lock file cannot be opened."""
    try:
        descriptor = os.open(run.lock_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(run, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor)
    finally:
        os.close(descriptor)
    return None


def _read(descriptor: int) -> Holder:
    """What the lock file says, if that process is still the one that wrote it; else a holder that is not known."""
    pid, _, began = os.pread(descriptor, 128, 0).decode("ascii", errors="replace").strip().partition(" ")
    if pid.isdigit() and began and started(int(pid)) == began:
        return Holder(int(pid), began)
    return Holder(0, "")
