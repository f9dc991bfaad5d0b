"""The store of the nats-server is put back from an older copy; checkpoints and everything else in the run directory stay as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec import UNSET

from streamrl.bus.server import NatsServer
from streamrl.schemas.versions import Version
from tests.support.world.fuse import Spot
from tests.support.world.nursery import Nursery
from tests.support.world.world import table_config, world

pytestmark = pytest.mark.nats

GAP = [Spot(name, when) for name in ("publish ledger", "publish marks") for when in ("before", "after")]
"""Where a trainer dies while it writes the gap and its epoch's mark."""


async def test_a_store_from_an_older_copy_goes_on_in_a_new_epoch(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    copy = tmp_path / "copy"
    async with world(table_config(tmp_path, run={"steps": 24}), own_server, children) as w:
        async with w.around("engine", "producer", "feeder"):
            await w.drain("trainer", 6)
        own_server.stop()
        shutil.copytree(own_server.directory, copy)
        own_server.start()
        before = len(await w.ledger())
        async with w.around("engine", "producer", "feeder"):
            await w.drain("trainer", 14)
        made = await w.ledger()
        own_server.stop()
        shutil.rmtree(own_server.directory)
        shutil.copytree(copy, own_server.directory)
        own_server.start()
        assert len(await w.ledger()) == before
        async with w.around("engine", "producer", "feeder"):
            await w.kill("trainer", GAP)
            assert await w.child("trainer") == 0
        entries = await w.ledger()
        [gap] = [entry for entry in entries if entry.gap is not UNSET]
        assert gap.gap is not UNSET and (gap.gap.lost, gap.gap.highest, gap.gap.known_by) == ("end", made[-1].version, "checkpoint")
        assert gap.version == Version(1, before)
        assert [str(entry.version) for entry in entries[before + 1 :]] == [f"1.{number}" for number in range(before + 1, 25)]
        digests = {entry.version: entry.digest for entry in made}
        assert all(digests[entry.version] == entry.digest for entry in entries if entry.version in digests)
        [problem] = (await w.audit()).problems
        assert f"versions up to {made[-1].version} were lost" in problem
        report = await w.replay()
        assert not report.ok and report.equal == 24 and len(report.lost) == 1, report.lines
