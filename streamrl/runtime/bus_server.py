"""The bus of a run: an embedded nats-server that is kept running, or an existing cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from streamrl.bus.address import OPERATOR, BusAddress
from streamrl.bus.server import STOP_S, NatsServer
from streamrl.config.tree import Config, SuperviseConfig
from streamrl.errors import LaunchError
from streamrl.runtime.credentials import certificate_of, logins, users_of, write_cluster, write_credentials
from streamrl.runtime.processes import signal_process, started
from streamrl.runtime.retries import FailureWindow
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import describe_exit

logger = logging.getLogger(__name__)

LEAST_FILES = 256
"""Each connection to the nats-server is one, and each stream some."""
_POLL_S = 0.2


class BusServer:
    """A bus that is up. `check` is called now and then by whoever can end the run."""

    def __init__(self, address: BusAddress) -> None:
        self.address = address
        self.failure: LaunchError | None = None

    def check(self) -> None:
        """Raise LaunchError if the server could not be kept running."""
        if self.failure is not None:
            raise self.failure


@contextlib.asynccontextmanager
async def run_bus_server(config: Config, run: RunDir, note: Callable[[str], None]) -> AsyncGenerator[BusServer]:
    """The bus of `run`, its credentials written to the run directory; an embedded server is stopped at the end.

    The server is started from the event loop's own thread on purpose: the kernel ends it when the thread that started it ends.

    Raises:
        LaunchError: no binary, the port is taken, no certificate can be made, or the server does not become ready.
        ConfigError: a secrets file cannot be read.
    """
    if config.bus.url:
        # A cluster that was set up before there were gateways, or rewarders, has no login for them.
        unused = {"gateway": config.gateway.workers == 0, "rewarder": config.reward.workers == 0}
        known = logins(config.bus, optional=[role for role, is_unused in unused.items() if is_unused])
        write_cluster(run, known)
        yield BusServer(known[OPERATOR])
        return
    ensure_open_files()
    bus, users = config.bus, users_of(run)
    server = NatsServer(
        run.bus_store,
        port=bus.port,
        sync_always=bus.sync_always,
        tls=certificate_of(run, bus),
        host=bus.host,
        advertise=bus.advertise,
        users=users,
    )
    await asyncio.to_thread(end_former, run)
    address = server.start()
    try:
        _write_down(run, server)
        write_credentials(run, server, users)
        up = BusServer(address)
        keeper = asyncio.create_task(_keep(server, up, config.supervise, note, run))
        try:
            yield up
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
    finally:
        server.stop()


def ensure_open_files(least: int = LEAST_FILES) -> None:
    """Raise the limit of open files of this process and those that it starts to `least`, if it is lower.

    Raises:
        LaunchError: that is more than this user may have. The server would take no connections, and everybody wait for it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= least:
        return
    if hard != unlimited and hard < least:
        raise LaunchError(
            f"expected a limit of at least {least} open files for nats-server, a process and those it starts may have {hard}",
            hint=f"raise the hard limit (ulimit -Hn, /etc/security/limits.conf, the service's or container's own) to {4 * least} or more",
            limit=hard,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))


def _process_path(run: RunDir) -> Path:
    return run.bus_store / "nats-server.process"


def _write_down(run: RunDir, server: NatsServer) -> None:
    if (pid := server.pid) is not None:
        _process_path(run).write_text(f"{pid} {started(pid)}")


def end_former(run: RunDir) -> None:
    """End the server of a supervisor that was killed: two may not share a store. On Linux it ends by itself, in its own time."""
    try:
        pid, _, began = _process_path(run).read_text().partition(" ")
    except (OSError, UnicodeDecodeError):
        return
    if not pid.isdecimal() or not 1 < int(pid) < 1 << 31:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        until_s = time.monotonic() + STOP_S
        while time.monotonic() < until_s:
            if not signal_process(int(pid), began, number):
                return
            time.sleep(_POLL_S)
    logger.warning("event=former_nats_server_stays pid=%s", pid)  # it waits for a dead disk, maybe


async def _keep(server: NatsServer, up: BusServer, config: SuperviseConfig, note: Callable[[str], None], run: RunDir) -> None:
    """Start the server again whenever it ends: same port, same store, so that clients reconnect and find everything."""
    failures = FailureWindow(config.window_s)
    while True:
        await asyncio.sleep(_POLL_S)
        code = server.poll()
        if code is None:
            continue
        count = failures.add(time.monotonic())
        note(f"nats-server ended with {describe_exit(code)}; restarting it on the same store")
        try:
            if count > config.max_restarts:
                raise LaunchError(
                    f"nats-server ended {count} times within {config.window_s:g} s",
                    hint=f"see {server.log_path}; is the disk full?",
                )
            if server.start() != up.address:
                raise LaunchError(
                    f"the port of the nats-server, {up.address.url}, was taken while it was down",
                    hint="run `up` again to resume on another port, or fix one with bus.port",
                )
            _write_down(run, server)
        except LaunchError as error:
            logger.error("event=bus_lost error=%s", error.message)
            up.failure = error
            return
