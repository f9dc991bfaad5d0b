"""The bus of a run that may or may not be up, for verbs that read its log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator

from streamrl.bus import connect
from streamrl.bus.protocol import Bus
from streamrl.launch.lock import holder, locked
from streamrl.launch.serving import serving
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import connected

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def opened(run: RunDir) -> AsyncGenerator[Bus]:
    """The run's bus: the one that is up, else a server on its store for as long as this is open (the run is locked meanwhile).

    Raises:
        BusUnavailable: the bus of a run that is up, or an existing cluster, does not answer.
        LaunchError: somebody starts the run at this moment, or the server cannot be started.
    """
    config = run.load_config()
    if config.bus.url or holder(run) is not None:
        async with connected(run) as bus:
            yield bus
        return
    with locked(run):
        async with serving(config, run, lambda text: logger.warning("event=note text=%s", text)) as server:
            bus = await connect(server.address, run.name, config.bus, name="reader")
            try:
                yield bus
            finally:
                await bus.close()
