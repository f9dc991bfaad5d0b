"""The handle of the server, in the process that uses it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

import streamrl
from streamrl.errors import LaunchError
from streamrl.sandbox.messages import Chosen, receive

logger = logging.getLogger(__name__)

Kind = Literal["namespaces", "landlock", "limits"]
HINT = "docs/sandbox.md says what a host has to allow"
_OWN_PATHS = tuple(dict.fromkeys(str(Path(str(package.__file__)).absolute().parents[1]) for package in (streamrl, msgspec)))
"""Of what the server imports; not the rest of `sys.path`, where a user's file may be called like a module of Python."""
_START_S = 90.0
_END_S = 10.0


class Server:
    """Starts it; what the isolation lacks is logged.

    Args:
        isolation: the only one that will do; None: the strongest that works.

    Raises:
        LaunchError: none works here.
    """

    def __init__(self, isolation: Kind | None) -> None:
        if sys.platform != "linux":
            raise LaunchError(
                f"expected Linux for a sandbox, got {sys.platform}, whose kernel keeps no program apart in the ways that it needs",
                hint="run producers and rewards that execute code of the model on Linux, or in a container of it",
            )
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_START_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "streamrl.sandbox.server", str(theirs.fileno()), *([isolation] if isolation else [])],
                # Nothing of this process that a program should not find out, were it to break out of its isolation.
                env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(_OWN_PATHS)},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            chosen = receive(self._control, Chosen) or Chosen("", why=("its server ended at its start",))
        except OSError as error:
            chosen = Chosen("", why=(f"its server did not start: {error}",))
        if not chosen.isolation:
            self.close()
            raise LaunchError(f"no sandbox{f' by {isolation}' if isolation else ''} works here: {'; '.join(chosen.why)}", hint=HINT)
        if chosen.isolation != "namespaces" or chosen.missing:
            logger.warning(
                "event=sandbox_weak isolation=%s missing=%r reason=%r hint=%s",
                chosen.isolation,
                "; ".join(chosen.missing),
                "; ".join(chosen.why),
                HINT,
            )
        self.chosen = chosen
        """How programs are kept apart."""

    def is_alive(self) -> bool:
        """Whether it can take programs."""
        return self._process.poll() is None

    def take(self, caller: socket.socket, stdout: int, stderr: int) -> None:
        """Fork a supervisor that reads its program from `caller`; raises LaunchError."""
        try:
            socket.send_fds(self._control, [b"\0"], [caller.fileno(), stdout, stderr])
        except OSError as error:
            raise LaunchError(f"the sandbox's server has ended: {error}", hint="the next program starts another one") from error

    def close(self) -> None:
        """It ends when it hears nobody any more."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
