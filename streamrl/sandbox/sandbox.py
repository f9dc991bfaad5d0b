"""The caller's side: programs are handed to the server, their output is taken within bounds, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import PurePosixPath
from threading import Lock

import msgspec

from streamrl.errors import SchemaError
from streamrl.sandbox.handle import Kind, Server
from streamrl.sandbox.limits import Limits, Result
from streamrl.sandbox.messages import Chosen, Program
from streamrl.sandbox.python import MAIN, interpreter, packages, packages_and_library
from streamrl.sandbox.run import Run
from streamrl.system import cores

_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "USER": "sandbox",
    # A thread for each of the host's processors would be over the limit of processes.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


waits_for_slot: ContextVar[Callable[[bool], None] | None] = ContextVar("waits_for_slot", default=None)
"""Told True when a program of this context begins to wait for its turn, and False when that is over, from any thread. Whoever counts the
time of code that calls the sandbox sets it."""


class Sandbox:
    """Runs programs that nobody has looked at; for any number of event loops and threads of one process.

    Its server is started with the first program, and again if it dies.

    Args:
        slots: programs that run at once; others wait their turn, and their time is not counted yet. None: one a processor.
        isolation: the only one that is good enough, `namespaces` for instance; None: the strongest that the host allows, and what
            it lacks is said in the log, once.
    """

    def __init__(self, *, slots: int | None = None, isolation: Kind | None = None) -> None:
        if slots is not None and slots < 1:
            raise SchemaError(
                f"expected at least one slot for the sandbox's programs, got {slots}", hint="leave it out for one a processor"
            )
        self._isolation: Kind | None = isolation
        self._threads = ThreadPoolExecutor(slots or cores(), thread_name_prefix="sandbox")
        self._lock = Lock()
        self._server: Server | None = None

    async def run_python(
        self, code: str, *, stdin: str | bytes = "", files: Mapping[str, str | bytes] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run `code` as a file of Python, with the packages of this interpreter; otherwise as `run`.

        A `MemoryError` that it does not catch counts as `memory`.
        """
        if MAIN in (files or {}):
            raise SchemaError(
                f"expected files beside the program, got one called {MAIN}, which is its own name", hint="give it another name"
            )
        argv = (interpreter(), "-s", "-B", MAIN)
        env = {"PYTHONPATH": os.pathsep.join(packages())}
        result = await self.run(
            argv, stdin=stdin, files={**(files or {}), MAIN: code}, limits=limits, env=env, readable=packages_and_library()
        )
        if result.reason == "error" and result.stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            return msgspec.structs.replace(result, reason="memory", detail="a process asked for more than it may have")
        return result

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        readable: Sequence[str] = (),
    ) -> Result:
        """Run a program in a directory of its own that goes with it; cancelling ends it first.

        Args:
            argv: the program's path and its arguments.
            stdin: what it reads there, and then the end.
            files: in its directory, by relative path.
            limits: None: the defaults.
            env: variables besides PATH, HOME and a few of that kind; none is taken over from this process.
            readable: absolute paths that it may read, besides the system's programs and libraries.

        Raises:
            SchemaError: something here that cannot be.
            LaunchError: it could not be started.
        """
        program = _checked(argv, stdin, files or {}, limits or Limits(), env or {}, readable)
        run, told = Run(program), waits_for_slot.get() or _told_to_nobody

        def finish() -> Result:
            told(False)
            return run.finish(self._ready())

        told(True)
        job = self._threads.submit(finish)
        work = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if job.cancel():
                told(False)
            else:
                run.stop()
                await asyncio.wait([work])
                work.exception()  # seen: what it gave is nobody's
            raise

    def check(self) -> Chosen:
        """How programs are kept apart here; starts the server. Raises LaunchError when they cannot be."""
        return self._ready().chosen

    def close(self) -> None:
        """End the server; another program starts it again. Those that run go on until whoever waits for them is cancelled."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None

    def _ready(self) -> Server:
        with self._lock:
            if self._server is not None and not self._server.is_alive():
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = Server(self._isolation)
            return self._server


def _told_to_nobody(waits: bool) -> None:
    pass


def _checked(
    argv: Sequence[str],
    stdin: str | bytes,
    files: Mapping[str, str | bytes],
    limits: Limits,
    env: Mapping[str, str],
    readable: Sequence[str],
) -> Program:
    if not argv or not os.path.isabs(argv[0]):
        raise SchemaError(f"expected the absolute path of a program for the sandbox, got {list(argv[:1])}", hint="such as /bin/sh")
    if spoilt := [word for word in (*argv, *env, *env.values(), *files, *readable) if "\0" in word]:
        raise SchemaError(f"expected arguments, variables and paths without a null character, got {spoilt[0]!r}")
    if outside := [name for name in files if not _is_inside(name)]:
        raise SchemaError(f"expected paths below the program's directory, got {outside[0]!r}", hint="name files as data/rows.txt")
    if relative := [path for path in readable if not os.path.isabs(path)]:
        raise SchemaError(f"expected absolute paths that the program may read, got {relative[0]!r}")
    contents = {name: _bytes(content) for name, content in files.items()}
    size = sum(map(len, contents.values()))
    if size > limits.disk_bytes or len(files) > limits.files:
        raise SchemaError(
            f"expected files within the limits of {limits.disk_bytes} bytes and {limits.files} files, got {size} bytes in {len(files)}",
            hint="raise disk_bytes or files of the sandbox's limits",
        )
    return Program(tuple(argv), {**_ENV, **env}, contents, _bytes(stdin), limits, tuple(readable))


def _is_inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.endswith("/") and ".." not in parts and parts[0] != "/"


def _bytes(content: str | bytes) -> bytes:
    # A lone surrogate, which text of a tokenizer may hold, becomes the program's error and not the caller's.
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
