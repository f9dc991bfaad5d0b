"""Python programs that are forked from one which has imported torch, transformers and megatron-core and done nothing: each costs
milliseconds, and not the six seconds of a processor that these imports take.

`Preloaded.start` is the one end; `python -m tests.support.preloaded SOCKET` is the other: each message is a `Request` with four
descriptors or five, the program's standard input, output and error, where its exit code goes, and one more that it is to have; the answer
is its process id. Ranks of `open_trainer` in such a program are forked too, and workers of `tests.support.forked_up`. What depends on how
a program starts (its command line, what it imports, a GPU) is for a real one.
"""

import asyncio
import atexit
import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from streamrl.system import dies_with_parent
from tests.support.programs import surroundings
from tests.support.shared import shared

MODULES = (
    *("streamrl.cli.workers", "streamrl.consumers.serving.engine_worker", "streamrl.consumers.training.worker"),
    *("streamrl.engines.local.engine", "streamrl.launch.up", "streamrl.producers.evaluation.worker", "streamrl.producers.feeder"),
    *("streamrl.producers.rollouts", "streamrl.trainers.ranks.local", "streamrl.trainers.ranks.leading"),
    *("streamrl.trainers.ranks.process_group", "streamrl.trainers.factory", "streamrl.trainers.torch.trainer"),
    *("streamrl.trainers.megatron.critic", "streamrl.trainers.megatron.model", "streamrl.trainers.megatron.ranks"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
ROOT = Path(__file__).parents[2]


class Request(msgspec.Struct, frozen=True):
    words: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    variable: str = ""
    """Says the number of the fifth descriptor."""
    session: bool = False
    """If true, it leads a session of its own."""


class Forked:
    """A program, as `subprocess.Popen` has one."""

    def __init__(self, pid: int, ending: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ending = ending

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None and select.select([self._ending], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._ending], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(os.read(self._ending, 16) or b"-9")  # who would have told it has ended, and all of its own with it
            os.close(self._ending)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """Starts programs; what they are forked from is started by the first one."""

    def __init__(self, orders: socket.socket | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = orders
        self._started: list[Forked] = []

    def start(
        self,
        *words: str,
        given: bytes = b"",
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        out: int | None = None,
        err: int | None = None,
        variable: str = "",
        more: Sequence[int] = (),
        session: bool = False,
    ) -> Forked:
        orders = self._socket or self._open()
        (reading, writing), (ending, told) = os.pipe(), os.pipe()
        variables = dict(os.environ if environment is None else environment)
        request = msgspec.json.encode(Request(words, variables, str(folder or Path.cwd()), variable, session))
        socket.send_fds(orders, [request], [reading, *(sys.stderr.fileno() if each is None else each for each in (out, err)), told, *more])
        os.close(reading)
        os.close(told)
        pid = int(orders.recv(64) or b"0")
        assert pid, "what programs are forked from has ended: what it said is above"
        self._started.append(Forked(pid, ending))
        with contextlib.suppress(BrokenPipeError), open(writing, "wb") as file:
            file.write(given)
        return self._started[-1]

    async def run(self, *words: str, folder: Path, patience_s: float = 20.0) -> tuple[int, str, str]:
        """Run a program to its end: its exit code, output and errors. It is ended, as a run is stopped at once, when the caller is."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self.start(*words, folder=folder, environment=surroundings(), out=out.fileno(), err=err.fileno())
            try:
                while process.poll() is None:
                    await asyncio.sleep(0.02)
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):  # two of one kind may arrive as one
                    process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
                process.kill()
            out.seek(0)
            err.seek(0)
            return process.wait(), out.read().decode(), err.read().decode()

    def start_rank(self, start: Any) -> Forked:
        """In the place of what `open_trainer` starts a rank by."""
        return self.start("-m", "streamrl.trainers.ranks.local", given=msgspec.json.encode(start))

    def running(self) -> list[int]:
        return [one.pid for one in self._started if one.poll() is None]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.wait()

    def _open(self) -> socket.socket:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            # A GPU that this process has looked at could not be used by its forks.
            with shared():
                variables = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
                self._process = subprocess.Popen(command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        return self._socket


PRELOADED = Preloaded()
"""Of this process: the fixture `preloaded` ends what it has started, and so does the end of the process."""


def be(request: Request, descriptors: Sequence[int], more: Sequence[int], orders: socket.socket) -> None:
    """In a fork: run as Python would and end."""
    from streamrl.trainers.ranks import local

    code: object = 1
    local._spawn = Preloaded(orders).start_rank  # type: ignore[assignment]  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environment)
        if more:
            os.environ[request.variable] = str(more[0])
        if request.session:
            os.setsid()
        option, what, *words = request.words
        sys.argv = [option, *words]
        if option == "-c":
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
        else:
            sys.modules.pop(what, None)  # run again under another name, of which Python would warn
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()  # multiprocessing ends its children there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1 if code else 0)


def serve(orders: socket.socket) -> None:
    """Fork on request until the other end closes; whoever is forked may ask too."""
    asking = [orders]
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tell: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([*asking, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            while tell and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                told = tell.pop(ended[0])
                with contextlib.suppress(BrokenPipeError):  # nobody asks any more
                    os.write(told, str(os.waitstatus_to_exitcode(ended[1])).encode())
                os.close(told)
        for one in [one for one in asking if one in ready]:
            message, descriptors, _, _ = socket.recv_fds(one, 1 << 20, 5)
            if not message:
                one.close()
                asking.remove(one)
                continue
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            tie = dies_with_parent(signal.SIGKILL)
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                tie()
                for descriptor in (*tell.values(), descriptors[3], woken, waker, *(each.detach() for each in (*asking, ours))):
                    os.close(descriptor)
                be(msgspec.json.decode(message, type=Request), descriptors[:3], descriptors[4:], theirs)
            theirs.close()
            asking.append(ours)
            tell[pid] = descriptors[3]
            for descriptor in (*descriptors[:3], *descriptors[4:]):
                os.close(descriptor)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                one.send(str(pid).encode())
        if orders not in asking:
            return


def nested() -> tuple[Preloaded, int]:
    """Return what forks of this process come from, and its id: it ends with this one, and they with it. Call it before any thread is."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tie = dies_with_parent(signal.SIGKILL)
    if not (pid := os.fork()):
        tie()
        ours.close()
        serve(theirs)
        os._exit(0)
    theirs.close()
    return Preloaded(ours), pid


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    from streamrl.trainers.megatron.core import imported

    imported()
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    # That of pyarrow's allocator, which sees to its own locks at a fork.
    assert len(threads - {"jemalloc_bg_thd"}) == 1, f"a lock that another thread holds would stay locked in every fork: {threads}"
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        serve(orders)


if __name__ == "__main__":
    main()
