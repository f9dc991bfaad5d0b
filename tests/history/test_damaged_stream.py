"""A replay of a stream that lost its end says which message is gone, and does not wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.data.model import ensure_model
from streamrl.history.replay import verify
from streamrl.schemas.subjects import SAMPLES
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.world.world import table_config

pytestmark = pytest.mark.nats


async def test_the_last_message_that_a_version_needs_is_gone(tmp_path: Path, nats_bus: JetStreamBus, run_id: str) -> None:
    run, config = make_run(tmp_path, table_config(tmp_path, run={"name": run_id, "steps": 4}))
    ensure_model(config, run.model_dir)
    await run_to_end(config, run, nats_bus)
    cursor = (await read_ledger(nats_bus, run_id))[-1].cursor
    for sequence in range(cursor, (await nats_bus.state(SAMPLES)).last + 1):
        await nats_bus.connection.request(f"$JS.API.STREAM.MSG.DELETE.{run_id}-samples", {"seq": sequence})
    assert (await nats_bus.state(SAMPLES)).last >= cursor, "the server keeps the numbers of messages that it lost"
    async with asyncio.timeout(60):
        report = await verify(config, nats_bus, run.model_dir)
    assert not report.ok and report.versions < 4
    assert f"message {cursor}," in report.problem
