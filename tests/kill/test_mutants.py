"""Five planted faults: each makes the audit fail, where the product in the same situation passes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import nats
import pytest
from nats.js.api import DiscardPolicy

from streamrl.bus.server import NatsServer
from streamrl.errors import StreamFull
from tests.support.world.fuse import Spot
from tests.support.world.nursery import Nursery
from tests.support.world.world import table_config, world

pytestmark = pytest.mark.nats


TRAINERS = [
    ("position before checkpoint", Spot("put latest", "before", 2), r"the position .* moved before the checkpoint"),
    ("publish before ledger", Spot("publish ledger", "before", 3), r"version 0\.3 was published, but is not in the ledger"),
]


@pytest.mark.parametrize("planted", [False, True], ids=["product", "mutant"])
@pytest.mark.parametrize(("mutant", "spot", "says"), TRAINERS, ids=[name for name, _, _ in TRAINERS])
async def test_trainer(
    tmp_path: Path, own_server: NatsServer, children: Nursery, mutant: str, spot: Spot, says: str, planted: bool
) -> None:
    async with world(table_config(tmp_path), own_server, children) as w:
        async with w.around("engine", "producer", "feeder"):
            await w.kill("trainer", [spot], mutant if planted else "")
        found = (await w.audit(complete=False)).problems
    assert bool(found) == planted, found
    assert not planted or any(re.search(says, problem) for problem in found), found


@pytest.mark.parametrize("mutant", ["", "retired set missing"])
async def test_retired_set_missing_from_the_checkpoint(tmp_path: Path, own_server: NatsServer, children: Nursery, mutant: str) -> None:
    # Slow tasks stay open below others that have ended. The drain's checkpoint is as new as the ledger: after an older one, the
    # trainer itself would find that its ledger's batches do not come again.
    config = table_config(tmp_path, reward={"options": {"slow_s": 3.0}}, tasks={"drop_zero_variance": False})
    async with world(config, own_server, children) as w:
        async with w.around("engine", "producer", "feeder"):
            await w.drain("trainer", 6, mutant)
            await w.kill("trainer", [Spot("publish ledger", "after")], mutant)
        found = (await w.audit(complete=False)).problems
    assert bool(found) == bool(mutant), found
    assert not mutant or any(re.search(r"tasks retired by the ledger, \d+ by its entries", problem) for problem in found), found


@pytest.mark.parametrize("mutant", ["", "acked on receipt"])
async def test_task_acked_on_receipt(tmp_path: Path, own_server: NatsServer, children: Nursery, mutant: str) -> None:
    async with world(table_config(tmp_path), own_server, children) as w:
        async with w.around("engine", "trainer", "feeder"):
            await w.kill("producer", [Spot("publish samples", "before", 2)], mutant)
        found = (await w.audit(complete=False)).problems
    assert bool(found) == bool(mutant), found
    assert not mutant or any(re.search(r"task \d+ is lost", problem) for problem in found), found


@pytest.mark.parametrize("discard", [DiscardPolicy.NEW, DiscardPolicy.OLD])
async def test_discard_old(tmp_path: Path, own_server: NatsServer, children: Nursery, discard: DiscardPolicy) -> None:
    async with world(table_config(tmp_path, bus={"samples_bytes": 300_000}), own_server, children) as w:
        address, name = own_server.address, f"{w.config.run.name}-samples"
        client = await nats.connect(address.url, user=address.user, password=address.password)
        config = (await client.jetstream().stream_info(name)).config
        await client.jetstream().update_stream(config.evolve(discard=discard))
        await client.close()
        async with w.around("engine", "producer", "feeder"):
            await w.kill("trainer", [Spot("publish ledger", "after", 3)])
        with contextlib.suppress(StreamFull):
            for _ in range(100):
                await w.bus.publish(w.subjects.samples("main"), bytes(8000))
        found = (await w.audit(complete=False)).problems
    old = discard is DiscardPolicy.OLD
    assert bool(found) == old, found
    assert not old or any(re.search(r"positions/main needs sequence \d+, the sample stream begins at \d+", problem) for problem in found), (
        found
    )
