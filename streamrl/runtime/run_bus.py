"""The bus of a run that may or may not be up, for verbs that read its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator

from streamrl.bus import connect
from streamrl.bus.protocol import Bus
from streamrl.errors import ConfigError, LaunchError
from streamrl.runtime.bus_server import run_bus_server
from streamrl.runtime.lock import holder, lock_run
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import connected
from streamrl.system import is_loopback

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5


def check_up(run: RunDir) -> None:
    """Raise LaunchError if the run's bus is known to be down, so that nobody waits for it in vain.

    That is known of an embedded server on loopback whose supervisor is gone. Others may be up on another host.
    """
    bus = run.load_config().bus
    if not bus.url and is_loopback(bus.host) and holder(run) is None:
        raise LaunchError(
            f"expected a run that is up, but nobody supervises run {run.name!r} in {run.path}",
            hint="start it with `streamrl up`; `streamrl status` lists all runs",
        )


async def until_down(run: RunDir, *, grace_s: float = 5.0) -> None:
    """Return once the run's bus is known to be down (`check_up`) and has been so for `grace_s` seconds."""
    since: float | None = None
    while since is None or time.monotonic() - since < grace_s:
        await asyncio.sleep(_LOOK_EVERY_S)
        try:
            check_up(run)
            since = None
        except LaunchError:
            since = time.monotonic() if since is None else since


@contextlib.asynccontextmanager
async def open_bus(run: RunDir, *, role: str = "") -> AsyncGenerator[Bus]:
    """The run's bus: the one that is up, else a server on its store for as long as this is open (the run is locked meanwhile).

    Args:
        run: which run.
        role: whose rights are enough on a bus that is up; empty: the operator's.

    Raises:
        ConfigError: the directory has no log: it is a branch, or its run has never been started.
        BusUnavailable: the bus of a run that is up, or an existing cluster, does not answer.
        LaunchError: somebody starts the run at this moment, or the server cannot be started.
    """
    config = run.load_config()
    if config.bus.url or holder(run) is not None:
        async with connected(run, role=role) as bus:
            yield bus
        return
    if not any(run.bus_store.glob("*")):
        raise ConfigError(
            f"expected a run with a log of its own, got {run.name!r}: there is none in {run.bus_store}",
            hint="a branch is trained from its parent's log, which branch.json names; a run has one once `streamrl up` has started it",
        )
    with lock_run(run):
        async with run_bus_server(config, run, lambda text: logger.warning("event=note text=%s", text)) as server:
            bus = await connect(server.address, run.name, config.bus, name="reader")
            try:
                yield bus
            finally:
                await bus.close()
