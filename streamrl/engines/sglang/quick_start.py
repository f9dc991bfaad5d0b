"""Starts an SGLang server whose processes import SGLang at the same time. Runs in SGLang's interpreter, on the standard library.

SGLang's server imports all of it and then spawns its scheduler and its detokenizer, which import all of it again. Here those processes
start first and import while the server does; when the server spawns one, the waiting process takes over what a spawned one is given:
a pickled `Process` by a pipe, file descriptors, environment variables. It is a child of the server like any other.

A process that has imported under other circumstances than a spawned one would is not used: SGLang then spawns, as it does by itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

from streamrl.system import dies_with_parent

SCHEDULER = "sglang.srt.managers.scheduler"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager"
_SEVERAL = (
    *("--dp", "--data-parallel", "--pp", "--pipeline-parallel", "--nnodes", "--ep-join", "--numa", "--enable-memory-saver"),
    *("--use-ray", "--grpc", "--smg-grpc", "--encoder-only", "--tokenizer-worker", "--detokenizer-worker"),
)
"""Flags that begin like this change which processes there are, or how they are spawned."""
_OTHER_MODELS = ("--speculative", "--model-impl", "--json-model-override", "--model-config")
"""With flags that begin like this a server may look for another model than the one in `config.json`."""
_CUDA = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "AUTO"}
"""Variables that SGLang sets before it spawns, and that CUDA reads when SGLang is imported."""
# The two that are left out are set by the server and read when a process works, the second for images and sound.
_READ_AT_IMPORT = re.compile(
    r"(?!(SGLANG_RUN_ID|SGLANG_USE_CUDA_IPC_TRANSPORT)$)(SGLANG|SGL|CUDA|LD|PYTHON|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|FLASHINFER)_?"
)
_OFF = ("", "0", "false")
_FIRST_FD = 200
"""Descriptors of a taken-over process get numbers from here on: lower ones may be in use, and a limit of 256 is common."""
_WAIT_S = 600.0
"""Seconds that a process waits to be used."""
_MODELS_VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"


class Waiting:
    """A process that imports `module` and waits to be used.

    Args:
        module: which process of SGLang it is to become: the module of its target.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._socket, other = socket.socketpair()
        command = spawn.get_command_line()
        command[command.index("-c") + 1] = f"from {__name__} import wait; wait({other.fileno()}, {module!r})"
        with other:
            self.process = subprocess.Popen(
                command, env={**os.environ, **_CUDA}, pass_fds=(other.fileno(),), preexec_fn=dies_with_parent(signal.SIGKILL)
            )

    def refusal(self, environment: Mapping[str, str]) -> str:
        """Why it cannot become a spawned process in this environment; empty: it can. Waits until its import is over."""
        try:
            own = json.loads(_line(self._socket) or "null")
        except OSError:
            own = None
        if own is None:
            return "it has ended"
        name = changed(own, environment)
        return f"{name} has changed since its import" if name else ""

    def hand_over(self, descriptors: Sequence[int], environment: Mapping[str, str]) -> None:
        """Let it become a spawned process.

        Args:
            descriptors: of the resource tracker, of the pipe to read from, of the sentinel, and then what the pickled process needs.
            environment: of the server by now.

        Raises:
            OSError: it has ended.
        """
        with self._socket as connection:
            socket.send_fds(connection, [b"\0"], descriptors)
            connection.sendall(json.dumps(dict(environment)).encode() + b"\n")


class Popen(popen_spawn_posix.Popen):
    """Spawns a process, or uses one that waits."""

    waiting: ClassVar[list[Waiting]] = []

    def __init__(self, process_obj: BaseProcess) -> None:
        self._taken: Waiting | None = None
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        """The number that descriptor `fd` will have in the process."""
        if self._taken is None:
            return super().duplicate_for_child(fd)
        self._fds.append(fd)
        return _FIRST_FD + len(self._fds) - 1

    def _launch(self, process_obj: BaseProcess) -> None:
        module = getattr(getattr(process_obj, "_target", None), "__module__", "")
        self._taken = next((one for one in self.waiting if one.module == module), None)
        if self._taken is not None:
            self.waiting.remove(self._taken)
            if self._use(self._taken, process_obj):
                return
            self._taken.process.kill()
            self._taken, self._fds = None, []
        super()._launch(process_obj)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def _use(self, taken: Waiting, process_obj: BaseProcess) -> bool:
        if why := taken.refusal(os.environ):
            print(f"event=streamrl_spawned module={taken.module} reason={why}", flush=True)
            return False
        body = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), body)
            reduction.dump(process_obj, body)
        finally:
            set_spawning_popen(None)
        sentinel, child_sentinel = os.pipe()
        child_reads, writes = os.pipe()
        try:
            taken.hand_over([resource_tracker.getfd() or 0, child_reads, child_sentinel, *self._fds], os.environ)
            with open(writes, "wb", closefd=False) as pipe:
                pipe.write(body.getbuffer())
        except OSError:  # it has died of something just now: seen by its sentinel, as with any process
            pass
        finally:
            for descriptor in (child_reads, child_sentinel, writes):
                os.close(descriptor)
        self.pid = taken.process.pid
        self.sentinel = sentinel
        self.finalizer = util.Finalize(self, os.close, (sentinel,))
        taken.process.returncode = 0  # whoever started it here does not wait for it any more: multiprocessing does
        print(f"event=streamrl_used module={taken.module} pid={self.pid}", flush=True)
        return True


def changed(imported: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the name of a variable that a module may have read at its import and that has another value now; empty: there is none.

    A switch that is off is as good as none.

    Args:
        imported: environment of a process that has imported SGLang.
        now: of the one that spawns.
    """
    for name in sorted(imported.keys() | now.keys()):
        if name in _CUDA and name not in now:
            continue
        old, new = imported.get(name, ""), now.get(name, "")
        if _READ_AT_IMPORT.match(name) and old != new and not (old.lower() in _OFF and new.lower() in _OFF):
            return name
    return ""


def wait(descriptor: int, module: str) -> None:
    """Import `module`, wait, and become the process that a server spawns; the end of a process that is not used."""
    with socket.socket(fileno=descriptor) as connection:
        importlib.import_module(module)
        connection.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
        connection.settimeout(_WAIT_S)
        try:
            told, descriptors, _, _ = socket.recv_fds(connection, 1, 64)
            text = _line(connection)
        except TimeoutError:
            return
    if not told:
        return
    environment: dict[str, str] = json.loads(text)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    # What is the same stays untouched: a process's title is written over its first variables, if they are where they were.
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    tracker, pipe, _, *others = descriptors
    for number, fd in enumerate(others, start=_FIRST_FD):
        os.dup2(fd, number, inheritable=False)
        os.close(fd)
    spawn.spawn_main(tracker_fd=tracker, pipe_handle=pipe)


def _line(connection: socket.socket) -> str:
    """The next line from a socket; empty: it was closed."""
    found = bytearray()
    while not found.endswith(b"\n"):
        if not (more := connection.recv(1 << 16)):
            return ""
        found += more
    return found.decode()


def processes(arguments: Sequence[str]) -> tuple[str, ...]:
    """The modules of the processes that a server with these arguments will spawn; none if that is not known."""
    if any(word.startswith(_SEVERAL) for word in arguments):
        return ()
    return (SCHEDULER,) * int(_value(arguments, "--tp-size") or 1) + (DETOKENIZER,)


def other_models(arguments: Sequence[str], models: Path) -> tuple[str, ...]:
    """Modules of SGLang's models that a server with these arguments does not need; none if that is not known.

    Args:
        arguments: of the server.
        models: the folder of SGLang's models.
    """
    if any(word.startswith(_OTHER_MODELS) for word in arguments):
        return ()
    try:
        config = json.loads((Path(_value(arguments, "--model-path")) / "config.json").read_text(encoding="utf-8"))
        architectures = [str(name) for name in config.get("architectures") or ()]
        texts = {path.stem: path.read_text(encoding="utf-8") for path in models.glob("*.py")}
    except (OSError, ValueError):
        return ()
    wanted: set[str] = set()
    for architecture in architectures:
        own = {name for name, text in texts.items() if re.search(rf"^class {re.escape(architecture)}\b", text, re.MULTILINE)}
        if not own or any("ModelRegistry" in texts[name] for name in own):  # a model that asks for others by name
            return ()
        wanted |= own
    return tuple(sorted(texts.keys() - wanted - {"__init__", "registry", "transformers"})) if wanted else ()


def _value(arguments: Sequence[str], flag: str) -> str:
    """The word that follows a flag; empty: it is not there."""
    return next((arguments[place + 1] for place, word in enumerate(arguments[:-1]) if word == flag), "")


def main(module: str, arguments: Sequence[str]) -> Any:
    """Run SGLang's `module` as a program with these arguments; returns when it has ended."""
    found = importlib.util.find_spec(module.partition(".")[0])
    if found is not None:
        folder = Path(next(iter(found.submodule_search_locations or ("",))))
        if _MODELS_VARIABLE not in os.environ and (left_out := other_models(arguments, folder / "srt" / "models")):
            os.environ[_MODELS_VARIABLE] = ",".join(left_out)
        Popen.waiting = [Waiting(one) for one in processes(arguments)]
        popen_spawn_posix.Popen = Popen
    sys.argv = [module, *arguments]
    return runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # Under its own name, not as `__main__`, which SGLang's module is to be.
    importlib.import_module("streamrl.engines.sglang.quick_start").main(sys.argv[1], sys.argv[2:])
