"""So many drops before one batch that a message of the ledger cannot carry them."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from streamrl.bus import BusAddress
from streamrl.bus.protocol import Bus
from streamrl.bus.reading import read_key
from streamrl.consumers.training.spilled_drops import PREFIX_BLOBS, whole
from streamrl.errors import NotFound
from streamrl.history.dead_letters import Fates
from streamrl.history.record import record
from streamrl.history.record_log import RecordedLog
from streamrl.history.replay import verify
from streamrl.launch.prepare import prepare
from streamrl.monitor.follow import Follower
from streamrl.monitor.view import RunView
from streamrl.runtime.run_record import write_or_check
from streamrl.schemas.codec import encode
from streamrl.schemas.control import RunRecord
from streamrl.schemas.ledger import SpilledDrops
from streamrl.schemas.samples import RewardUpdate
from streamrl.schemas.subjects import KEY_RUN, Subjects
from tests.support.audit.audit import audit
from tests.support.audit.raw import read_run
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.world.world import table_config

pytestmark = [pytest.mark.nats, pytest.mark.slow]

REPEATS = 40_001


async def flood(bus: Bus, subject: str) -> None:
    """One early reward and `REPEATS` repeats of it, each of which is a drop."""
    body = encode(RewardUpdate(task=0, rollout=0, reward=1.0, revision=1))
    for begin in range(0, REPEATS + 1, 2000):
        await asyncio.gather(*(bus.publish(subject, body, id=f"r{n}") for n in range(begin, min(begin + 2000, REPEATS + 1))))


@pytest.mark.timeout(400)
async def test_a_batch_after_forty_thousand_drops(tmp_path: Path, make_nats_bus: Any, nats_address: BusAddress, run_id: str) -> None:
    config = table_config(tmp_path, run={"name": run_id, "steps": 4}, trainer={"checkpoint_every": 1000}, data={"max_prompt_tokens": 16})
    run, config = make_run(tmp_path, config)
    bus = await make_nats_bus(config.bus)
    await write_or_check(bus, await prepare(config, run))
    await flood(bus, Subjects(run_id).rewards)
    await run_to_end(config, run, bus, timeout_s=120.0)

    first, *others = ledger = await read_ledger(bus, run_id)
    assert isinstance(first.spilled, SpilledDrops) and first.drops == ()
    assert first.spilled.number >= REPEATS and first.dropped["superseded_reward"] == REPEATS
    assert all(entry.spilled is msgspec.UNSET for entry in others)
    drops = (await whole(bus.blobs, first)).drops
    assert len(drops) == first.spilled.number and [d.sequence for d in drops] == sorted(d.sequence for d in drops)

    # Without the pointer to its checkpoint the trainer derives everything again from the log, and appends nothing.
    await bus.kv.delete("latest/main")
    await run_to_end(config, run, bus, timeout_s=120.0)
    assert await read_ledger(bus, run_id) == ledger and len(ledger) == 4
    assert [name for name in await bus.blobs.names() if name.startswith(PREFIX_BLOBS)] == [first.spilled.blob]

    report = await verify(config, bus, run.model_dir)
    assert report.ok and report.equal == 4, report.lines
    found = await audit(nats_address.url, nats_address.user, nats_address.password, run_id)
    assert found.problems == [] and found.counts["drops"] >= REPEATS
    view = RunView(run_id)
    async with Follower(bus, view) as follower:
        await follower.catch_up()
    assert view.numbers(elapsed_s=1.0).drops["superseded_reward"] == REPEATS
    fate = await Fates(bus, Subjects(run_id), "main").of_message(REPEATS)
    assert fate.state == "dropped" and "superseded_reward" in fate.detail

    out = tmp_path / "recorded"
    await record(bus, config, run, out, run_record=await read_key(bus.kv, KEY_RUN, RunRecord))
    table = pq.read_table(out / "ledger.parquet", columns=["drops"])
    assert len(table.column("drops")[0]) == len(drops)
    again = await verify(config, RecordedLog(out), run.model_dir)
    assert again.ok and again.equal == 4, again.lines

    await bus.blobs.delete(first.spilled.blob)
    with pytest.raises(NotFound):
        await verify(config, bus, run.model_dir)
    raw = await read_run(nats_address.url, nats_address.user, nats_address.password, run_id)
    assert raw.blobs == {}
