"""A trainer whose device keeps one snapshot: each version's buffer is free again as soon as the version is stored."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from streamrl.bus.memory.bus import MemoryBus
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.torch.snapshot import Published, SnapshotRing
from streamrl.weights.publisher import Publisher
from streamrl.weights.shm import ShmTransport
from streamrl.weights.slices import OtherRanks, RankPublisher, Requests
from tests.support.digests import digest_of

CPU = torch.device("cpu")


def ring(tensor: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...] = ()) -> SnapshotRing:
    """Waits for its buffer no longer than a version takes here by far."""
    return SnapshotRing([Published("w", tensor, tensor.dtype, shape, offset)], CPU, slots=1, holder_patience_s=20.0)


async def test_a_rank_offers_the_next_version_when_the_one_before_is_stored(tmp_path: Path) -> None:
    bus = MemoryBus("r")
    transport = ShmTransport(run="r", policy="policy", directory=tmp_path, rank=1)
    publisher = RankPublisher(bus.kv, "policy", {"shm": transport}, rank=1, loop=asyncio.get_running_loop())
    others = OtherRanks(1, lambda *_: None, 20.0)
    requests = Requests(bus.kv, "policy", others)
    own = ring(torch.ones(4, 3), (8, 3), (4, 0))
    for number in range(1, 4):
        await asyncio.to_thread(publisher.offer, others.word, Version(0, number), (), own.shards())
        await requests.ask(Version(0, number), "shm")
        assert len(await requests.contributions("shm")) == 1
    publisher.close()
    transport.close()


@pytest.mark.parametrize("keep", [0, 2])
async def test_a_trainer_offers_one_version_after_the_other(tmp_path: Path, keep: int) -> None:
    bus = MemoryBus("r")
    transport = ShmTransport(run="r", policy="policy", directory=tmp_path)
    publisher = Publisher(bus, Subjects("r"), transport, policy="policy", loop=asyncio.get_running_loop(), keep=keep)
    weights = torch.zeros(8, 3)
    own = ring(weights, (8, 3))
    for number in range(1, 6):
        weights += 1.0
        digest = digest_of([("w", weights)], "llama")
        await asyncio.to_thread(publisher.offer, Version(0, number), digest, own.shards())
    await asyncio.to_thread(publisher.close, 60.0)
    transport.close()
