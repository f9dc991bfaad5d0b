"""One supervisor per run: a lock on the run directory that the kernel frees when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator

from streamrl.errors import LaunchError
from streamrl.runtime.rundir import RunDir


@contextlib.contextmanager
def lock_run(run: RunDir) -> Generator[None]:
    """Hold the run's lock; raises LaunchError that names the holder's process id when somebody else has it."""
    descriptor = os.open(run.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = _read_pid(descriptor)
            raise LaunchError(
                f"run {run.name!r} is running already, supervised by process {pid}",
                hint=f"look at it with `streamrl status {run.name}`, stop it with `streamrl down {run.name}`, or choose another --name",
                pid=pid,
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def holder(run: RunDir) -> int | None:
    """Process id of the run's supervisor, or None if it is not running."""
    try:
        descriptor = os.open(run.lock_path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_pid(descriptor)
    finally:
        os.close(descriptor)
    return None


def _read_pid(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip()
    return int(text) if text.isdigit() else 0
