"""Workers as child processes on this machine, each the leader of its own process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from streamrl.config.code_copies import VARIABLE as CODE_VARIABLE
from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.runtime import beats
from streamrl.runtime.kernels import kernel_folders
from streamrl.runtime.kinds import environment, inherited
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import STACKS_SIGNAL, SUPERVISOR_VARIABLE

Command = Callable[[str, int], Sequence[str]]
_TAIL_LINES = 15
_TAIL_BYTES = 4096
LOGS_EVERY_S = 5.0
"""How often logs are looked at for their size."""


def worker_logs(run: RunDir, worker: str = "") -> list[Path]:
    """Logs that processes append their output to, those of servers of engines too; of one worker, or of all."""
    return [path for path in run.logs.glob(f"{worker}*.log") if path != run.events_path]


class LocalProcess:
    """A child and its process group."""

    why = ""
    """The supervisor itself watches it."""

    def __init__(self, child: subprocess.Popen[bytes], beats: int) -> None:
        self._child = child
        self._swept = False
        self._beats = beats
        """The end of the pipe to read from."""

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
            os.close(self._beats)
        return code

    def heard(self) -> str:
        """The newest beat since the last call; empty: none."""
        if self._swept:
            return ""
        try:
            return os.read(self._beats, 4096).decode()[-1:]
        except BlockingIOError:
            return ""

    def dump(self) -> None:
        """Have the worker write its stacks, also one that is stopped: it is let go on, and the signal comes first."""
        if self._child.poll() is None:
            self._child.send_signal(STACKS_SIGNAL)
            self._child.send_signal(signal.SIGCONT)

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
        surroundings |= kernel_folders(self._config, kind, surroundings)
        if self._run.code.is_dir():
            surroundings[CODE_VARIABLE] = str(self._run.code)
        command = [*self._command(kind, index)]
        pipe: tuple[int, ...] = ()
        try:
            pipe = reading, writing = os.pipe()
            os.set_blocking(reading, False)
            os.set_blocking(writing, False)
            surroundings[beats.VARIABLE] = str(writing)
            with self._run.log_path(f"{kind}-{index}").open("ab") as log:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=surroundings,
                    start_new_session=True,
                    pass_fds=(writing,),
                )
        except OSError as error:
            for end in pipe:
                os.close(end)
            raise LaunchError(
                f"worker {kind}-{index} cannot be started: {error}", hint="is the disk full, or the limit of processes reached?"
            ) from error
        os.close(writing)
        return LocalProcess(child, reading)

    def tail(self, worker: str) -> str:
        """The last lines of a worker's log; empty if there are none, or they cannot be read."""
        try:
            with self._run.log_path(worker).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read(_TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError:  # what a worker said last never ends who only wants to tell it
            return ""
        return "\n".join(lines[-_TAIL_LINES:]).rstrip()

    def _worker_command(self, kind: str, index: int) -> Sequence[str]:
        return (sys.executable, "-m", "streamrl", "worker", kind, "--run", str(self._run.path), "--index", str(index))
