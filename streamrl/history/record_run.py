"""`record`: a run, up or not, as files."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from streamrl.bus.reading import read_key
from streamrl.config.tree import Config
from streamrl.errors import BusUnavailable
from streamrl.history.record import Recording, record
from streamrl.history.tap_position import hold_stream, keeping_position
from streamrl.runtime.lock import holder
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import RunRecord
from streamrl.schemas.subjects import KEY_RUN

logger = logging.getLogger(__name__)

LEASE_S = 60


async def record_run(run: RunDir, out: Path, *, checkpoints: bool = False) -> Recording:
    """Record everything that the run has at this moment; while it is up, hold its stream against trimming for as long as this takes.

    Raises:
        ConfigError: `out` exists.
        LaunchError: the run is being started, or its server cannot be.
        LogTruncated: the stream was trimmed before it could be held.
    """
    config = run.load_config()
    if not config.bus.url and holder(run) is None:
        return await _record(config, run, out, checkpoints)
    try:
        return await _record(config, run, out, checkpoints, reader=f"record-{os.getpid()}")
    except BusUnavailable as error:
        if config.bus.url or holder(run) is not None:
            raise
        logger.warning("event=recording_begins_again reason=the_run_has_ended run=%s error=%s", run.name, error.message)
    return await _record(config, run, out, checkpoints)


async def _record(config: Config, run: RunDir, out: Path, checkpoints: bool, *, reader: str = "") -> Recording:
    """`reader`: under this name the stream is held meanwhile."""
    async with contextlib.AsyncExitStack() as held:
        bus = await held.enter_async_context(open_bus(run))
        if reader:
            await hold_stream(bus, reader, lease_s=LEASE_S)
            await held.enter_async_context(keeping_position(bus, reader, lease_s=LEASE_S, release=True))
        return await record(bus, config, run, out, run_record=await read_key(bus.kv, KEY_RUN, RunRecord), checkpoints=checkpoints)
