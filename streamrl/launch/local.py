"""Workers as child processes on this machine, each the leader of its own process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence

from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.runtime.kinds import environment, inherited
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import SUPERVISOR_VARIABLE

Command = Callable[[str, int], Sequence[str]]
_TAIL_LINES = 15


class LocalProcess:
    """A child and its process group."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self._swept = False

    @property
    def pid(self) -> int:
        """Process id, which is its group's id too."""
        return self._child.pid

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        code = self._child.poll()
        if code is not None and not self._swept:
            # A worker that died may leave children (the ranks of a trainer), which are in its group.
            self._swept = True
            self._signal_group(signal.SIGKILL)
        return code

    def stop(self) -> None:
        """SIGTERM to the worker alone: what it has started is its own to end."""
        if self._child.poll() is None:
            self._child.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        if not self._swept:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)


class LocalLauncher:
    """Starts `python -m streamrl worker KIND` with its output appended to `logs/<worker>.log`.

    Args:
        run: whose workers.
        config: gives each kind its thread counts.
        command: the command line of a worker, for tests.
    """

    def __init__(self, run: RunDir, config: Config, *, command: Command | None = None) -> None:
        self._run = run
        self._config = config
        self._command = command or self._worker_command

    def start(self, kind: str, index: int) -> LocalProcess:
        """Start one worker.

        It has its own session, so that Ctrl-C in the terminal reaches the supervisor alone, which then drains in order.
        """
        surroundings = {**inherited(os.environ, kind), **environment(self._config, kind), SUPERVISOR_VARIABLE: str(os.getpid())}
        command = [*self._command(kind, index)]
        try:
            with self._run.log_path(f"{kind}-{index}").open("ab") as log:
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=surroundings, start_new_session=True
                )
        except OSError as error:
            raise LaunchError(
                f"worker {kind}-{index} cannot be started: {error}", hint="is the disk full, or the limit of processes reached?"
            ) from error
        return LocalProcess(child)

    def tail(self, worker: str) -> str:
        """The last lines of a worker's log; empty if there are none."""
        try:
            with self._run.log_path(worker).open(encoding="utf-8", errors="replace") as log:
                return "".join(deque(log, maxlen=_TAIL_LINES)).rstrip()
        except FileNotFoundError:
            return ""

    def _worker_command(self, kind: str, index: int) -> Sequence[str]:
        return (sys.executable, "-m", "streamrl", "worker", kind, "--run", str(self._run.path), "--index", str(index))
