"""The process that programs are forked from: `python -m streamrl.sandbox.server DESCRIPTOR [KIND]`.

It is small, has one thread, and knows none of its caller's secrets: neither environment nor memory is the caller's. Being there already, it
saves each program the start of an interpreter that does what comes before it.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from streamrl.sandbox.confined import Confined
from streamrl.sandbox.isolation import Isolation
from streamrl.sandbox.limits import Limits
from streamrl.sandbox.messages import Chosen, Program, Report, receive, send
from streamrl.sandbox.namespaces import Namespaces
from streamrl.sandbox.python import interpreter, packages_and_library
from streamrl.sandbox.supervise import supervise

Make = Callable[[], Isolation]
_OWN_USER = (False,) if os.geteuid() else (True, False)
"""Only the superuser can give a program another one; its files may lie where that one does not get to."""
KINDS: Mapping[str, tuple[Make, ...]] = MappingProxyType(
    {
        "namespaces": (Namespaces,),
        "landlock": tuple(partial(Confined, by_landlock=True, own_user=own) for own in _OWN_USER),
        "limits": tuple(partial(Confined, by_landlock=False, own_user=own) for own in _OWN_USER),
    }
)
"""The strongest first, and of one kind too."""
_TRIAL_S = 20.0


def main() -> None:
    """Say which isolation works here, then run what comes until the caller is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    chosen, make = _choose(sys.argv[2:] or list(KINDS))
    send(control, chosen)
    if make is None:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        if not data:
            return
        if not os.fork():
            control.close()
            _fork(socket.socket(fileno=descriptors[0]), descriptors[1], descriptors[2], make())
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(caller: socket.socket, stdout: int, stderr: int, isolation: Isolation) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        supervise(caller, stdout, stderr, isolation)
    except Exception:  # this process must not go on as a second server
        traceback.print_exc()
    finally:
        os._exit(0)


def _choose(kinds: Sequence[str]) -> tuple[Chosen, Make | None]:
    """The first isolation in which an interpreter can be run; it is tried."""
    why: list[str] = []
    for kind in kinds:
        for make in KINDS[kind]:
            report = _tried(make())
            if not report.failed and not report.exit_code:
                return Chosen(kind, report.missing, tuple(why)), make
            why.append(f"{kind}: {report.failed or report.detail or f'an interpreter ends with exit code {report.exit_code}'}")
    return Chosen("", why=tuple(why)), None


def _tried(isolation: Isolation) -> Report:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        quiet = os.open(os.devnull, os.O_WRONLY)
        _fork(theirs, quiet, os.dup(quiet), isolation)
    theirs.close()
    try:
        ours.settimeout(_TRIAL_S)
        send(ours, Program((interpreter(), "-S", "-c", "pass"), {}, {}, b"", Limits(), packages_and_library()))
        return receive(ours, Report) or Report(failed="its process has ended without a word")
    except OSError as error:
        return Report(failed=str(error))
    finally:
        ours.close()
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
