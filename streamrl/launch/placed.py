"""A worker on a node of a cluster: a child process of the actor that Ray has put there. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import os
import time

from streamrl.config.load import from_json
from streamrl.config.ray import OWN_GPUS_VARIABLE
from streamrl.errors import ConfigError, LaunchError, StreamRLError
from streamrl.launch.build_model import build_model
from streamrl.launch.local import LOGS_EVERY_S, LocalLauncher, LocalProcess, worker_logs
from streamrl.runtime.beats import STACKS_S, Silence
from streamrl.runtime.kinds import LOADING_S
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import Exit
from streamrl.system import write_private
from streamrl.telemetry.logs import bound_logs
from streamrl.weights.factory import free_weights

_POLL_S = 0.05


class PlacedWorker:
    """The body of an actor, all of whose methods run in its event loop. `start` is called once.

    Args:
        path: the run directory, under the same path as at the supervisor.
        config: the configuration as JSON.
        files: what a run directory of this host's own needs, by path within: credentials. Where the supervisor's directory is seen here
            (the same host, or a shared file system) nothing is written.
        kind: of the worker.
        index: of the worker.
        gpus: whether the worker was given GPUs; else it sees none.
    """

    def __init__(self, path: str, config: str, files: dict[str, bytes], kind: str, index: int, gpus: bool) -> None:
        self._run = RunDir(path)
        self._config = from_json(config, where="what the supervisor sent")
        self._files = files
        self._kind = kind
        self._index = index
        self._process: LocalProcess | None = None
        self._code: int | None = None
        self._said = ""
        # The environment of this process is the worker's.
        os.environ[OWN_GPUS_VARIABLE] = "1"
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""

    async def start(self) -> int:
        """Start the worker; returns its process id, 0 when that failed (then `tail` says why)."""
        try:
            self._prepare()
            await build_model(self._config, self._run)
            self._process = LocalLauncher(self._run, self._config).start(self._kind, self._index)
        except StreamRLError as error:
            self._said = f"error: {error}"
            self._code = Exit.CONFIG if isinstance(error, ConfigError) else Exit.FAILED
            return 0
        return self._process.pid

    async def wait(self) -> tuple[int, str]:
        """The exit code, negative for a signal, once the worker has ended; and why it was ended, if that was for its silence."""
        silence = Silence(self._config.supervise.silent_s, LOADING_S[self._kind], time.monotonic())
        look_s = 0.0
        while self._code is None:
            if self._process is not None:
                self._code = self._process.poll()
                if self._code is None and not silence.why and silence.look(self._process.heard(), time.monotonic()):
                    self._process.dump()
                    await asyncio.sleep(STACKS_S)
                    self._process.kill()
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + LOGS_EVERY_S
                bound_logs(worker_logs(self._run, f"{self._kind}-{self._index}"))
            await asyncio.sleep(_POLL_S)
        return self._code, silence.why

    async def stop(self) -> None:
        """Ask the worker to drain and end."""
        if self._process is not None:
            self._process.stop()

    async def kill(self) -> None:
        """End the worker and what it has started at once."""
        if self._process is not None:
            self._process.kill()

    async def tail(self) -> str:
        """The last lines of the worker's log, or why there is none."""
        return self._said or LocalLauncher(self._run, self._config).tail(f"{self._kind}-{self._index}")

    async def free(self) -> None:
        """Free the shared memory of the run on this host; once all of its workers have ended."""
        free_weights(self._config.weights, self._run.name, self._run.path)

    def _prepare(self) -> None:
        """See to it that there is a run directory here, with this run's credentials."""
        token = self._run.engine_token_path
        try:
            if token.exists() and token.read_bytes() == self._files[str(token.relative_to(self._run.path))]:
                return
            self._run.create()
            for name, data in self._files.items():
                write_private(self._run.path / name, data)
            self._run.write_config(self._config)
        except OSError as error:
            raise LaunchError(
                f"the run directory {self._run.path} cannot be used on {os.uname().nodename}: {error}",
                hint="set run.dir to a path that can be made on every node",
            ) from error
