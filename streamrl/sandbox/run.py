"""One program from its start to its end, in a thread of the caller's that waits for it."""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import ExitStack, suppress
from threading import Lock

from streamrl.errors import LaunchError
from streamrl.sandbox.handle import HINT, Server
from streamrl.sandbox.limits import Reason, Result
from streamrl.sandbox.messages import Program, Report, receive, send

_LATE_S = 60.0
"""That the end may be late: init keeps the time, on a host that is busy or stood still."""
_CHUNK = 1 << 16


class Run:
    """Not started yet."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._lock = Lock()
        self._caller: socket.socket | None = None
        self._stopped = False

    def stop(self) -> None:
        """End it, from any thread, before its start too; `finish` then returns or raises soon."""
        with self._lock:
            self._stopped = True
            if self._caller is not None:
                with suppress(OSError):  # it has ended
                    self._caller.shutdown(socket.SHUT_WR)

    def finish(self, server: Server) -> Result:
        """Start it and wait for its end; all its processes are gone then. Raises LaunchError when it could not be started."""
        with ExitStack() as stack:
            caller, theirs = socket.socketpair()
            stack.enter_context(caller)
            outputs: list[_Output] = []
            with theirs, ExitStack() as given:
                writers: list[int] = []
                for _ in range(2):
                    reader, writer = os.pipe()
                    stack.callback(os.close, reader)
                    given.callback(os.close, writer)
                    outputs.append(_Output(reader, self._program.limits.output_bytes))
                    writers.append(writer)
                server.take(theirs, writers[0], writers[1])
            caller.settimeout(_LATE_S)
            with self._lock:
                self._caller = caller
            stack.callback(self._forget)
            if self._stopped:
                self.stop()
            try:
                send(caller, self._program)
                report = self._collect(caller, outputs)
            except OSError as error:
                report = Report(failed=str(error))
        return self._result(report, outputs)

    def _forget(self) -> None:
        with self._lock:
            self._caller = None

    def _collect(self, caller: socket.socket, outputs: list[_Output]) -> Report:
        poll = select.poll()
        open_ones = {output.descriptor: output for output in outputs}
        for descriptor in (caller.fileno(), *open_ones):
            poll.register(descriptor, select.POLLIN)
        deadline_s = time.monotonic() + self._program.limits.seconds + _LATE_S
        report = None
        while (left_s := deadline_s - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left_s * 1000):
                if (output := open_ones.get(descriptor)) is not None:
                    if not output.read():
                        poll.unregister(descriptor)
                        del open_ones[descriptor]
                        if output.over:
                            self.stop()
                elif report is None:
                    report = receive(caller, Report)
                    if report is None:
                        return Report(failed="its supervisor ended without a word")
                elif not caller.recv(1):  # the supervisor has gone as the last one
                    for output in open_ones.values():
                        output.drain()
                    return report
        return Report(failed=f"it did not end within {_LATE_S:g} s of its time limit")

    def _result(self, report: Report, outputs: list[_Output]) -> Result:
        if report.failed:
            raise LaunchError(f"a program of the sandbox could not be run: {report.failed}", hint=HINT)
        reason: Reason = report.reason
        detail = report.detail
        if any(output.over for output in outputs):
            reason, detail = "output", f"it wrote more than {self._program.limits.output_bytes} bytes"
        stdout, stderr = (bytes(output.taken).decode(errors="replace") for output in outputs)
        return Result(stdout, stderr, report.exit_code, reason, detail, report.seconds)


class _Output:
    """What one descriptor gives, up to a number of bytes."""

    def __init__(self, descriptor: int, at_most: int) -> None:
        self.descriptor = descriptor
        self.taken = bytearray()
        self.over = False
        """Whether there was more."""
        self._at_most = at_most

    def read(self) -> bool:
        """Take what is there; returns whether more may follow."""
        data = os.read(self.descriptor, _CHUNK)
        room = self._at_most - len(self.taken)
        self.taken += data[:room]
        self.over = len(data) > room
        return bool(data) and not self.over

    def drain(self) -> None:
        """Take the rest of what was written; whoever still holds the other end is not waited for."""
        os.set_blocking(self.descriptor, False)
        with suppress(BlockingIOError):
            while self.read():
                pass
