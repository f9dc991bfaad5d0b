"""The supervisor and the init of one program: they start it, watch it, end it with all that came of it, and say what became of it.

```text
caller -- socket --+-- supervisor (forked by the server)   waits for init, then removes what is left
                   +--   init                              starts the program, waits, looks at what it uses
                           program and its processes
```

When the caller is gone or leaves, its socket ends, and init ends everything. When init ends, its namespace ends with it; without namespaces
the processes of the program become the supervisor's, which kills them.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import time
from contextlib import suppress
from math import ceil

import msgspec

from streamrl.sandbox import kernel
from streamrl.sandbox.isolation import Isolation
from streamrl.sandbox.limits import Reason
from streamrl.sandbox.messages import Program, Report, receive, send

_LOOK_S = 0.02
_SHARE = 10
"""Looking takes no more than one part in so many of the time."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CHILD_FILES = 256


def supervise(caller: socket.socket, stdout: int, stderr: int, isolation: Isolation) -> None:
    """Run what the caller sends; this process is of no other use afterwards."""
    program = receive(caller, Program)
    if program is None:
        return
    os.setsid()
    kernel.prctl("PR_SET_CHILD_SUBREAPER", kernel.PR_SET_CHILD_SUBREAPER, 1)
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # the first to go where the host has no memory left
        isolation.prepare(program)
        init = os.fork()
    except OSError as error:
        _say(caller, Report(failed=str(error)))
        return
    if not init:
        _init(caller, stdout, stderr, isolation, program)
    os.close(stdout)
    os.close(stderr)
    _, status = os.waitpid(init, 0)
    if os.waitstatus_to_exitcode(status):  # it has said nothing
        _say(caller, Report(-signal.SIGKILL, "killed", "the process that watched it was killed"))
    isolation.clean()


def _init(caller: socket.socket, stdout: int, stderr: int, isolation: Isolation, program: Program) -> None:
    try:
        home = isolation.enter(program)
        # After the last change of user, which would clear it.
        kernel.prctl("PR_SET_PDEATHSIG", kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl("PR_SET_DUMPABLE", kernel.PR_SET_DUMPABLE, 0)
        child, began_s = _start(isolation, program, home, stdout, stderr)
    except OSError as error:
        _say(caller, Report(failed=str(error)))
    else:
        report = _watch(child, began_s, caller, isolation, program)
        _say(caller, msgspec.structs.replace(report, missing=isolation.missing))
    os._exit(0)


def _say(caller: socket.socket, report: Report) -> None:
    with suppress(OSError):  # it has left
        send(caller, report)


def _start(isolation: Isolation, program: Program, home: str, stdout: int, stderr: int) -> tuple[int, float]:
    told, problem = os.pipe()
    began_s = time.monotonic()
    child = os.fork()
    if not child:
        try:
            _execute(isolation, program, home, stdout, stderr, problem)
        except Exception as error:  # whatever it is, it is not the program's
            os.write(problem, str(error).encode()[:4096])
        finally:
            os._exit(127)
    for descriptor in (problem, stdout, stderr):
        os.close(descriptor)
    said = os.read(told, 4096)  # ends with the exec
    os.close(told)
    if said:
        raise OSError(said.decode(errors="replace"))
    return child, began_s


def _execute(isolation: Isolation, program: Program, home: str, stdout: int, stderr: int, problem: int) -> None:
    os.setsid()
    _limit(program, isolation.num_beside())
    isolation.become()
    os.umask(0o077)
    os.chdir(home)
    os.dup2(_stdin(program.stdin), 0)
    for name, content in program.files.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        _write(name, content)
    # They may be 0 to 2 themselves.
    outputs = os.dup(stdout), os.dup(stderr)
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)
    os.set_inheritable(problem, False)
    os.closerange(3, problem)
    os.closerange(problem + 1, 1 << 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # what is ignored stays so after an exec
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    isolation.confine(program)
    os.execve(program.argv[0], program.argv, {**program.env, "HOME": home, "TMPDIR": home})


def _limit(program: Program, num_beside: int) -> None:
    limits = program.limits
    for which, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, ceil(limits.cpu_seconds) + 1),
        (resource.RLIMIT_FSIZE, limits.disk_bytes + len(program.stdin)),
        (resource.RLIMIT_NPROC, limits.processes + num_beside),
        (resource.RLIMIT_NOFILE, _CHILD_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(which)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (least, least))


def _write(name: str, content: bytes) -> None:
    with open(name, "xb") as file:
        file.write(content)


def _stdin(content: bytes) -> int:
    if not content:
        return os.open(os.devnull, os.O_RDONLY)
    _write(".stdin", content)
    descriptor = os.open(".stdin", os.O_RDONLY)
    os.unlink(".stdin")
    return descriptor


def _watch(child: int, began_s: float, caller: socket.socket, isolation: Isolation, program: Program) -> Report:
    """Until the program ends, is over a limit, or its caller has left."""
    limits = program.limits
    ending = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ending, select.POLLIN)
    poll.register(caller, select.POLLIN)
    pause_s = _LOOK_S
    while True:
        left_s = began_s + limits.seconds - time.monotonic()
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, min(pause_s, left_s)) * 1000)}
        seconds = time.monotonic() - began_s
        if (status := _reaped(child)) is not None:
            return _ended(os.waitstatus_to_exitcode(status), seconds)
        if caller.fileno() in ready:
            return Report(-signal.SIGKILL, "killed", "its caller has left", seconds)
        if left_s <= 0:
            return Report(-signal.SIGKILL, "timeout", f"{limits.seconds:g} s are over", seconds)
        looked_s = time.monotonic()
        if over := _over(isolation, program):
            reason, detail = over
            return Report(-signal.SIGKILL, reason, detail, seconds)
        pause_s = max(_LOOK_S, _SHARE * (time.monotonic() - looked_s))


def _reaped(child: int) -> int | None:
    """Wait for whoever has ended; the status of the program itself, if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    return found


def _ended(code: int, seconds: float) -> Report:
    if code >= 0:
        return Report(code, "error" if code else "ok", "", seconds)
    if code == -signal.SIGXCPU:
        return Report(code, "timeout", "its processor time is over", seconds)
    return Report(code, "killed", f"by signal {-code} ({signal.strsignal(-code)})", seconds)


def _over(isolation: Isolation, program: Program) -> tuple[Reason, str] | None:
    limits = program.limits
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s, memory_bytes, num_threads = used.ru_utime + used.ru_stime, 0, 0
    for process in isolation.processes():
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                words = file.read().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        # proc_pid_stat(5), counted from field 3: utime and stime of it and of those it has waited for, num_threads, rss.
        cpu_s += sum(map(int, words[11:15])) / _TICKS
        num_threads += int(words[17])
        memory_bytes += int(words[21]) * _PAGE
    if cpu_s > limits.cpu_seconds:
        return "timeout", f"{limits.cpu_seconds:g} s of processor time are over"
    if memory_bytes > limits.memory_bytes:
        return "memory", f"its processes hold more than {limits.memory_bytes} bytes together"
    if num_threads > limits.processes:
        return "killed", f"it has more than {limits.processes} processes and threads"
    if excess := isolation.excess(program):
        return "killed", excess
    return None
