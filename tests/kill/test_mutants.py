"""Five planted faults: each makes the audit fail, where the product at the same calls passes."""

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
from tests.support.world.table import OTHERS
from tests.support.world.world import World, table_config, world

pytestmark = [pytest.mark.nats, pytest.mark.slow]

DEATHS = {
    "position before checkpoint": ("trainer", Spot("put latest", "before", 2), r"position .* moved before the checkpoint"),
    "publish before ledger": ("trainer", Spot("publish ledger", "before", 3), r"0\.3 was published, but is not in the ledger"),
    "acked on receipt": ("producer", Spot("publish samples", "before", 2), r"task \d+ is lost"),
}
RETIRED = "retired set missing"
DISCARDS = "a stream that discards old messages"
# Slow tasks stay open below others that have ended. The drain's checkpoint is as new as the ledger: after an older one, the trainer itself
# would find that its ledger's batches do not come again.
SLOW: dict[str, dict[str, object]] = {"reward": {"options": {"slow_s": 3.0}}, "tasks": {"drop_zero_variance": False}}
SMALL: dict[str, dict[str, object]] = {"bus": {"samples_bytes": 300_000}}
SECTIONS = {RETIRED: SLOW, DISCARDS: SMALL}


async def found(w: World) -> str:
    return "\n".join((await w.audit(complete=False)).problems)


async def die(w: World, part: str, spot: Spot, mutant: str = "") -> None:
    beside = tuple(one for one in (*OTHERS, "trainer") if one != part)
    async with w.around(*beside):
        await w.kill(part, [spot], mutant)


async def retire(w: World, mutant: str = "") -> None:
    async with w.around(*OTHERS):
        await w.drain("trainer", await w.num_entries() + 6, mutant)
        await w.kill("trainer", [Spot("publish ledger", "after")], mutant)


async def fill(w: World, discard: DiscardPolicy) -> None:
    address, name = w.server.address, f"{w.config.run.name}-samples"
    client = await nats.connect(address.url, user=address.user, password=address.password)
    config = (await client.jetstream().stream_info(name)).config
    await client.jetstream().update_stream(config.evolve(discard=discard))
    await client.close()
    with contextlib.suppress(StreamFull):
        for _ in range(100):
            await w.bus.publish(w.subjects.samples("main"), bytes(8000))


async def test_the_product_passes(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    async with world(table_config(tmp_path, **SLOW, **SMALL), own_server, children) as w:
        for part, spot, _ in DEATHS.values():
            await die(w, part, spot)
            assert await found(w) == "", (part, spot)
        await retire(w)
        assert await found(w) == ""
        await fill(w, DiscardPolicy.NEW)
        assert await found(w) == ""


@pytest.mark.parametrize("mutant", [*DEATHS, RETIRED, DISCARDS])
async def test_a_mutant_is_found(tmp_path: Path, own_server: NatsServer, children: Nursery, mutant: str) -> None:
    async with world(table_config(tmp_path, **SECTIONS.get(mutant, {})), own_server, children) as w:
        if mutant == RETIRED:
            await retire(w, RETIRED)
            says = r"retired by the ledger, \d+ by its entries"
        elif mutant == DISCARDS:
            await die(w, "trainer", Spot("publish ledger", "after", 3))
            await fill(w, DiscardPolicy.OLD)
            says = r"positions/main needs sequence \d+, the sample stream begins at \d+"
        else:
            part, spot, says = DEATHS[mutant]
            await die(w, part, spot, mutant)
        assert re.search(says, await found(w))
