"""Stopping a run from another terminal."""

from __future__ import annotations

import signal
import time

from streamrl.errors import LaunchError
from streamrl.runtime.bus_server import end_former
from streamrl.runtime.lock import Holder, holder, lock_run
from streamrl.runtime.processes import signal_process
from streamrl.runtime.rundir import RunDir
from streamrl.weights.factory import free_weights

_POLL_S = 0.1


def stop_run(run: RunDir, *, now: bool, timeout_s: float) -> bool:
    """Signal the run's supervisor and wait until it is gone; returns whether it was running.

    Of a run whose supervisor was killed, free the shared memory that it left behind, and end its nats-server if that is still there.

    Args:
        run: which run.
        now: stop at once instead of draining (as a second Ctrl-C does).
        timeout_s: patience.

    Raises:
        LaunchError: it is still there after `timeout_s`, or belongs to another user.
    """
    found = holder(run)
    if found is None:
        if not run.exists:  # its preparation was killed
            return False
        with lock_run(run):
            end_former(run)
            free_weights(run.load_config().weights, run.name, run.path)
        return False
    _signal(found, run)
    if now:
        time.sleep(_POLL_S)
        _signal(found, run)
    deadline = time.monotonic() + timeout_s
    while holder(run) is not None:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"run {run.name!r} is still stopping after {timeout_s:g} s (process {found.pid})",
                hint="stop it at once with `streamrl down --now`",
            )
        time.sleep(_POLL_S)
    return True


def _signal(supervisor: Holder, run: RunDir) -> None:
    if not supervisor.pid:
        raise LaunchError(
            f"run {run.name!r} is locked by a process that has not said which one it is",
            hint=f"is it starting, or on another host? Try again, or there; `fuser {run.lock_path}` names it on its own",
        )
    try:
        signal_process(supervisor.pid, supervisor.began, signal.SIGTERM)
    except PermissionError as error:
        raise LaunchError(
            f"run {run.name!r} is supervised by process {supervisor.pid} of another user", hint="stop it as the user who started it"
        ) from error
