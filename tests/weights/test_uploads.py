"""Ranks that publish on several transports: who waits for whose upload, for how long, and what is stored again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.memory.bus import MemoryBus
from streamrl.config.tree import WeightsConfig
from streamrl.weights.manifest import Content, offers
from tests.support.processes import until
from tests.weights.test_ranks import model, whole
from tests.weights.test_slices import SUBJECTS, Held, Ranks, announced, read


@pytest.fixture
def config() -> WeightsConfig:
    # Kept for ever: then the files lie in the run's folder.
    return WeightsConfig(transport="shm", keep=0, also_on_bus=True, anchor_every=4)


async def test_a_rank_whose_bytes_go_is_waited_for_beyond_the_patience(tmp_path: Path, config: WeightsConfig) -> None:
    bus = MemoryBus("r")
    ranks = Ranks(bus, tmp_path, config, patience_s=1.0)
    late = Held(run="r", policy="policy", directory=tmp_path / "weights", rank=1)
    late.go = asyncio.Event()
    ranks.others[0].transports["shm"] = late  # type: ignore[index]
    await ranks.offer(1)
    await until(lambda: late.moved is not None)
    assert late.moved is not None
    for _ in range(25):  # 2.5 s
        late.moved()
        await asyncio.sleep(0.1)
    late.go.set()
    await ranks.close()
    assert (await announced(bus)).digest == Content(model(1)).digest
    late.close()


async def test_rank_0_uploads_while_the_others_do(tmp_path: Path, config: WeightsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transport is answered for by itself: rank 0 does not wait for the others' upload before its own."""
    bus = MemoryBus("r")
    ranks = Ranks(bus, tmp_path, config)
    slow = ranks.others[0].transports["bus"]
    go, contribute, signs = asyncio.Event(), slow.contribute, list[bool]()

    async def held(version, shards, *, moved):
        await go.wait()
        return await contribute(version, shards, moved=lambda: signs.append(True) or moved())

    monkeypatch.setattr(slow, "contribute", held)
    await ranks.offer(1)
    while not await bus.blobs.names():
        await asyncio.sleep(0.01)
    assert await bus.last(SUBJECTS.weights("policy")) is None
    go.set()
    await ranks.close()
    assert (await announced(bus)).digest == Content(model(1)).digest
    assert signs  # each blob is one


async def test_a_version_whose_bytes_are_gone_is_stored_again_by_all(tmp_path: Path, config: WeightsConfig) -> None:
    bus = MemoryBus("r")
    ranks = Ranks(bus, tmp_path, config)
    await ranks.offer(1)
    while await bus.last(SUBJECTS.weights("policy")) is None:
        await asyncio.sleep(0.01)
    first = await announced(bus)
    for path in (tmp_path / "weights").glob("*.weights"):
        path.unlink()
    for name in await bus.blobs.names():
        await bus.blobs.delete(name)
    await ranks.offer(1)
    await ranks.close()
    again = await announced(bus)
    assert not {part.location for part in first.parts} & {part.location for part in again.parts}
    for found in offers(again):
        assert await read(bus, tmp_path, config, found) == whole(1)
