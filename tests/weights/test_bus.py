"""A publisher that dies while its blobs go out."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from streamrl.bus import Bus
from streamrl.bus.server import NatsServer
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.weights.bus import BusTransport
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import Shard
from streamrl.weights.publisher import Publisher
from tests.support.wanted import slices

KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
import numpy as np
from streamrl.bus import BusAddress, connect
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.weights.bus import BusTransport
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import Shard
from streamrl.weights.publisher import Publisher

fill, calls = Content.fill, []
def dying_fill(self, start, out):
    calls.append(start)
    if len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    fill(self, start, out)
Content.fill = dying_fill

async def main():
    bus = await connect(BusAddress.load(Path(sys.argv[1])), "r")
    transport = BusTransport(bus.blobs, run="r", policy="policy", part_bytes=16)
    publisher = Publisher(bus, Subjects("r"), transport, policy="policy", loop=asyncio.get_running_loop())
    shard = Shard(name="w", dtype="uint8", global_shape=(256,), shape=(256,), data=np.arange(256, dtype=np.uint8))
    await asyncio.to_thread(publisher.offer, Version(0, 1), Content([shard]).digest, [shard])
    await asyncio.to_thread(publisher.close)

asyncio.run(main())
"""


@pytest.mark.nats
async def test_a_publisher_killed_in_the_middle_announces_nothing_and_its_blobs_are_retired(
    own_server: NatsServer, nats_bus: Bus, tmp_path: Path
):
    own_server.address.save(tmp_path / "bus.json")
    ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", KILLED, str(tmp_path / "bus.json")], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert await nats_bus.last("r.weights.policy") is None
    orphans = set(await nats_bus.blobs.names())
    # Three are on their way at once: the sixth was begun when three had been stored.
    assert 3 <= len(orphans) <= 5

    transport = BusTransport(nats_bus.blobs, run="r", policy="policy", part_bytes=64)
    publisher = Publisher(nats_bus, Subjects("r"), transport, policy="policy", loop=asyncio.get_running_loop(), keep=1)
    for number in (1, 2):
        shard = Shard(name="w", dtype="uint8", global_shape=(256,), shape=(256,), data=np.full(256, number, np.uint8))
        after = (await nats_bus.state("weights")).last
        await asyncio.to_thread(publisher.offer, Version(0, number), Content([shard]).digest, [shard])
        async for _ in nats_bus.read("weights", after=after):
            break
    await asyncio.to_thread(publisher.close)
    names = set(await nats_bus.blobs.names())
    assert len(names) == 4 and not names & orphans
    manifest = await transport.publish(Version(0, 2), iter([shard]))
    assert {part.location for part in manifest.parts} == names
    data = b"".join([bytes(part.data) async for part in transport.fetch(manifest, slices(manifest))])
    assert data == bytes([2]) * 256
