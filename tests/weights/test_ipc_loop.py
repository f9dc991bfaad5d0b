"""Snapshots, publisher, transport and watcher together: a trainer that steps while its versions are published, read and served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import WeightsConfig
from streamrl.consumers.serving.weight_watcher import WeightWatcher
from streamrl.schemas.codec import decode
from streamrl.schemas.subjects import WEIGHTS, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.trainers.torch.snapshot import SnapshotRing
from streamrl.weights.factory import free_weights, make_publisher, make_transports
from streamrl.weights.ipc import IpcTransport
from streamrl.weights.protocol import Commit, Part, Shard, Slice, WeightTransport
from streamrl.weights.publisher import Publisher
from streamrl.weights.shm import ShmTransport
from tests.support.wanted import slices
from tests.weights.host_memory import MappedOpener, share

SUBJECTS = Subjects("r")


class Trainer:
    """One parameter of 1 MB whose elements are all the number of steps, and its snapshots."""

    def __init__(self, *, slots: int = 2, patience_s: float = 10.0) -> None:
        self.parameter = torch.zeros(512, 512)
        self.ring = SnapshotRing(
            [("w", self.parameter)], torch.device("cpu"), slots=slots, share=share, reader_patience_s=5.0, holder_patience_s=patience_s
        )

    def step(self) -> str:
        """Returns the digest of the parameters, as a ledger entry holds it."""
        self.ring.settle()
        self.parameter += 1
        return combine({"w": tensor_digest(self.parameter.reshape(-1).view(torch.uint8).numpy(), 4)})


class Host:
    """Serves the number that all elements of a version are; remembers what it served."""

    def __init__(self) -> None:
        self.served: dict[Version, float] = {}
        self._staged = float("nan")

    def wants(self, manifest: Manifest) -> Sequence[Slice]:
        return slices(manifest)

    async def stage(self, manifest: Manifest, parts: AsyncIterator[Part]) -> str:
        content = np.empty(manifest.nbytes, np.uint8)
        async for part in parts:
            content[part.start : part.start + len(part.data)] = np.frombuffer(part.data, np.uint8)
        values = np.unique(content.view(np.float32))
        assert len(values) == 1, f"torn version {manifest.version}: {values}"
        self._staged = float(values[0])
        return combine({"w": tensor_digest(content, 4)})

    async def commit(self, version: Version) -> Commit:
        self.served[version] = self._staged
        return Commit(version, True, 0.0)


class Slow:
    """A transport that begins to publish and waits until the test lets it go on."""

    def __init__(self, inner: WeightTransport) -> None:
        self._inner = inner
        self.begun = asyncio.Event()
        self.open = asyncio.Event()

    async def publish(self, version: Version, shards: Iterator[Shard]) -> Manifest:
        self.begun.set()
        await self.open.wait()
        return await self._inner.publish(version, shards)

    async def holds(self, manifest: Manifest) -> bool:
        return await self._inner.holds(manifest)

    async def retire(self, older_than: Version) -> None:
        await self._inner.retire(older_than)


def ipc(directory: Path) -> IpcTransport:
    shm = ShmTransport(run="r", policy="policy", directory=directory)
    return IpcTransport(run="r", policy="policy", directory=directory, fallback=shm, opener=MappedOpener)


async def announced(bus: MemoryBus) -> list[Manifest]:
    state = await bus.state(WEIGHTS)
    found = [await bus.fetch(WEIGHTS, sequence) for sequence in range(state.first, state.last + 1)]
    return [decode(bytes(message.body), Manifest) for message in found]


async def test_every_version_served_is_one_that_was_trained(memory_bus: MemoryBus, tmp_path: Path) -> None:
    trainer, host = Trainer(), Host()
    publisher = Publisher(memory_bus, SUBJECTS, ipc(tmp_path), policy="policy", loop=asyncio.get_running_loop())
    committed: asyncio.Queue[Version] = asyncio.Queue()
    watcher = WeightWatcher(
        memory_bus, SUBJECTS, host, {"ipc": ipc(tmp_path)}, policy="policy", engine="e", committed=committed.put, backoff_s=0.01
    )
    watching = asyncio.create_task(watcher.run())

    def train(first: int) -> None:
        for number in range(first, first + 20):
            digest = trainer.step()
            publisher.offer(Version(0, number), digest, trainer.ring.shards())

    try:
        for first in (1, 21, 41):
            await asyncio.to_thread(train, first)
            while await asyncio.wait_for(committed.get(), 60) < Version(0, first + 19):
                pass
        await asyncio.to_thread(publisher.close)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert host.served == {version: float(version.number) for version in host.served}
    assert {Version(0, 20), Version(0, 40), Version(0, 60)} <= host.served.keys()
    assert {manifest.transport for manifest in await announced(memory_bus)} == {"ipc"}


async def test_a_snapshot_that_waits_is_let_go_for_the_next_one(memory_bus: MemoryBus, tmp_path: Path) -> None:
    """Two buffers, one of them being published for a long time: the trainer goes on, and never waits."""
    trainer = Trainer(slots=2, patience_s=0.5)
    slow = Slow(ipc(tmp_path))
    publisher = Publisher(memory_bus, SUBJECTS, slow, policy="policy", loop=asyncio.get_running_loop())  # type: ignore[arg-type]
    for number in range(1, 6):
        await asyncio.to_thread(publisher.offer, Version(0, number), trainer.step(), trainer.ring.shards())
        await slow.begun.wait()
    slow.open.set()
    await asyncio.to_thread(publisher.close)
    assert [manifest.version.number for manifest in await announced(memory_bus)] == [1, 5]


async def test_on_a_host_without_a_gpu_the_same_configuration_takes_shared_memory(
    memory_bus: MemoryBus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = WeightsConfig(transport="ipc")
    with caplog.at_level(logging.WARNING):
        publisher = make_publisher(
            config, bus=memory_bus, subjects=SUBJECTS, policy="policy", run_dir=tmp_path, loop=asyncio.get_running_loop()
        )
        data = np.full(4, 7, np.float32)
        shard = Shard(name="w", dtype="float32", global_shape=(4,), shape=(4,), data=data.view(np.uint8))
        digest = combine({"w": tensor_digest(shard.host(), 4)})
        try:
            await asyncio.to_thread(publisher.offer, Version(0, 1), digest, [shard])
            await asyncio.to_thread(publisher.close)
            host = Host()
            (manifest,) = await announced(memory_bus)
            transports = make_transports(config, bus=memory_bus, run="r", policy="policy", run_dir=tmp_path)
            assert manifest.transport == "shm"
            assert await host.stage(manifest, transports["shm"].fetch(manifest, host.wants(manifest))) == digest
        finally:
            free_weights(config, "r", tmp_path)
    assert "event=weights_ipc_unavailable policy=policy reason=trainer_has_no_gpu" in caplog.text
