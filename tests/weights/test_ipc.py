"""Transport `ipc` with the snapshots of a trainer on the host: who may read a buffer, and when it is written again.

The ring, the leases and the processes are real; only the device is not (`tests.weights.host_memory`; the device's own tests are in
`test_ipc_gpu.py`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest
import torch

from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Copying, Manifest
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.trainers.torch.snapshot import Published, SnapshotRing
from streamrl.weights.ipc import IpcTransport
from streamrl.weights.pins import Pins
from streamrl.weights.protocol import CudaSource
from streamrl.weights.shm import ShmTransport
from tests.support.errors import raises
from tests.support.wanted import fetched, slices
from tests.weights.host_memory import MappedOpener, share

CPU = torch.device("cpu")


class Trainer:
    """Parameters that change with every version, and their snapshots."""

    def __init__(self, directory: Path, *, slots: int = 2, patience_s: float = 30.0, pins: Pins | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            "b.weight": torch.randn(37, 16, generator=generator).bfloat16(),
            "a.scale": torch.randn((), generator=generator),
            "head": torch.randn(16, 300, generator=generator),
            "empty": torch.zeros(0, 4),
        }
        named = list(self.parameters.items())
        self.ring = SnapshotRing(named, CPU, slots=slots, share=share, reader_patience_s=patience_s, holder_patience_s=2.0)
        self.directory = directory
        self.transport = reader(directory, pins=pins)

    def digest(self) -> str:
        return combine(
            {name: tensor_digest(p.reshape(-1).view(torch.uint8).numpy(), p.element_size()) for name, p in self.parameters.items()}
        )

    def step(self) -> None:
        self.ring.settle()
        for parameter in self.parameters.values():
            parameter.mul_(-1.5)

    async def publish(self, number: int) -> Manifest:
        shards = await asyncio.to_thread(self.ring.take)
        return await self.transport.publish(Version(0, number), iter(shards))


def reader(directory: Path, *, usable: bool = True, pins: Pins | None = None, sources: bool = False) -> IpcTransport:
    shm = ShmTransport(run="r", policy="policy", directory=directory)
    opener: Callable[[], MappedOpener] | None = None if sources else lambda: MappedOpener(usable=usable)
    return IpcTransport(run="r", policy="policy", directory=directory, fallback=shm, opener=opener, pins=pins)


async def read(transport: IpcTransport, manifest: Manifest) -> str:
    content = await fetched(transport, manifest)
    items = {"bfloat16": 2, "float32": 4}
    return combine({t.name: tensor_digest(content[t.offset : t.offset + t.nbytes], items[t.dtype]) for t in manifest.tensors})


@asynccontextmanager
async def engine(directory: Path, manifest: Manifest) -> AsyncIterator[Process]:
    """A process that has taken the version's lease."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.weights.ipc_reader", str(directory), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.msgpack.encode(manifest).hex().encode() + b"\n")
        assert await answer(process) == "leased"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def answer(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def let_go(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    await process.stdin.drain()


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "weights")


@pytest.mark.process
async def test_another_process_reads_the_snapshot_and_not_the_parameters(trainer: Trainer) -> None:
    manifest = await trainer.publish(1)
    digest = trainer.digest()
    trainer.step()
    assert manifest.digest == digest != trainer.digest()
    assert (manifest.transport, len(manifest.parts)) == ("ipc", 1)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    async with engine(trainer.directory, wire) as process:
        await let_go(process)
        assert await answer(process) == digest


async def test_the_ring_holds_the_newest_versions(trainer: Trainer) -> None:
    other = reader(trainer.directory)
    manifests: list[Manifest] = []
    for number in range(4):
        manifests.append(await trainer.publish(number))
        trainer.step()
    assert [await other.holds(manifest) for manifest in manifests] == [False, False, True, True]
    assert [await read(other, manifest) for manifest in manifests[2:]] == [manifest.digest for manifest in manifests[2:]]
    assert len({manifest.digest for manifest in manifests}) == 4
    with raises(WeightSyncError, gone="policy 0.1") as caught:
        await read(other, manifests[1])
    assert "newer" in caught.value.hint


@pytest.mark.process
async def test_a_buffer_is_not_written_while_an_engine_reads_it(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, slots=1)
    first = await trainer.publish(1)
    async with engine(tmp_path, first) as process:
        before = memory(first)
        trainer.step()
        second = asyncio.create_task(trainer.publish(2))
        while await reader(tmp_path).holds(first):
            await asyncio.sleep(0.01)
        # No new reader begins, and what the old one reads stays.
        assert not second.done()
        assert memory(first) == before
        await let_go(process)
        manifest = await second
        said = await answer(process)
        assert said.startswith("error policy 0.1: ") and "a newer version" in said
    assert memory(first) != before
    assert await read(reader(tmp_path), manifest) == trainer.digest() == manifest.digest


def memory(manifest: Manifest) -> bytes:
    out = np.empty(manifest.nbytes, np.uint8)
    MappedOpener().open(manifest.parts[0].handle, "", {""}).read(0, out)
    return out.tobytes()


@pytest.mark.process
async def test_a_dead_reader_holds_nothing_up(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, slots=1, patience_s=1e9)
    async with engine(tmp_path, await trainer.publish(1)) as process:
        process.send_signal(signal.SIGKILL)
        await process.wait()
        trainer.step()
        assert await read(reader(tmp_path), await trainer.publish(2)) == trainer.digest()


@pytest.mark.process
async def test_a_stuck_reader_loses_the_buffer_and_learns_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(tmp_path, slots=1, patience_s=0.1)
    async with engine(tmp_path, await trainer.publish(1)) as process:
        process.send_signal(signal.SIGSTOP)
        trainer.step()
        manifest = await trainer.publish(2)
        process.send_signal(signal.SIGCONT)
        await let_go(process)
        said = await answer(process)
        assert said.startswith("error policy 0.1: ") and "taken back" in said
    assert "event=weights_reader_sent_away version=0.1" in caplog.text
    assert await read(reader(tmp_path), manifest) == manifest.digest


async def test_a_version_that_is_taken_back_between_two_parts_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.weights.ipc.PIECE_BYTES", 500)
    trainer = Trainer(tmp_path, slots=1, patience_s=0.05)
    first = await trainer.publish(1)
    parts = reader(tmp_path).fetch(first, slices(first))
    got = await anext(parts)
    assert bytes(got.data) == memory(first)[got.start : got.start + 500]
    trainer.step()
    await trainer.publish(2)
    with raises(WeightSyncError, taken_back="policy 0.1"):
        await anext(parts)


async def test_a_source_is_checked_when_it_is_left(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, slots=1, patience_s=0.05)
    manifest = await trainer.publish(1)
    outside = reader(tmp_path, sources=True)
    assert await outside.holds(manifest)
    async with outside.source(manifest) as source:
        assert isinstance(source, CudaSource)
        (memory,) = source.memory
        assert (memory.offset, memory.nbytes, memory.handle) == (0, manifest.nbytes, manifest.parts[0].handle)
        assert (tmp_path / f"policy.{memory.owner}.owner").exists()
    with raises(WeightSyncError, taken_back="policy 0.1"):
        async with outside.source(manifest):
            await trainer.publish(2)
    with raises(WeightSyncError, version="0.3", device="cuda"):
        await read(outside, await trainer.publish(3))


async def test_a_dead_trainers_memory_is_not_held_and_its_files_go(tmp_path: Path) -> None:
    old = Trainer(tmp_path)
    manifest = await old.publish(1)
    old.transport.close()
    other = reader(tmp_path)
    assert not await other.holds(manifest)
    with raises(WeightSyncError, gone="policy 0.1"):
        await read(other, manifest)
    new = await Trainer(tmp_path).publish(1)
    assert await other.holds(new)
    assert sorted(name.rpartition(".")[2] for name in os.listdir(tmp_path)) == ["lease", "owner"]


async def test_a_lease_that_a_manifest_names_twice_is_refused_and_none_stays_taken(trainer: Trainer) -> None:
    """Which would keep the buffer from being written until this process ends."""
    manifest = await trainer.publish(1)
    part = msgspec.structs.replace(manifest.parts[0], copying=msgspec.UNSET)
    half = part.nbytes // 2
    parts = (msgspec.structs.replace(part, nbytes=half), msgspec.structs.replace(part, offset=half, nbytes=part.nbytes - half))
    bad = msgspec.structs.replace(manifest, parts=parts)
    transport = reader(trainer.directory, sources=True)
    with raises(WeightSyncError, location=part.location):
        async with transport.source(bad):
            pass
    with raises(WeightSyncError, location=part.location):
        await read(reader(trainer.directory), bad)
    assert trainer.transport._published[Version(0, 1)][1].revoke(0)


async def test_publishing_again_is_the_same_version(trainer: Trainer) -> None:
    manifest = await trainer.publish(1)
    assert await trainer.publish(1) == manifest
    trainer.step()
    with raises(WeightSyncError, version="0.1", published=manifest.digest):
        await trainer.publish(1)


async def test_older_versions_are_freed_but_for_pinned_and_read_ones(tmp_path: Path, memory_bus) -> None:
    pins = Pins(memory_bus.kv, "policy")
    trainer = Trainer(tmp_path, slots=4, pins=pins)
    manifests = [await trainer.publish(number) for number in range(4)]
    await pins.hold(Version(0, 0), "evaluator-0")
    async with trainer.transport.source(manifests[1]):
        await trainer.transport.retire(Version(0, 3))
        assert [await trainer.transport.holds(manifest) for manifest in manifests] == [True, True, False, True]
    await trainer.transport.retire(Version(0, 3))
    assert [await trainer.transport.holds(manifest) for manifest in manifests] == [True, False, False, True]


async def test_memory_that_cannot_be_reached_from_here_is_not_held(trainer: Trainer) -> None:
    manifest = await trainer.publish(1)
    assert not await reader(trainer.directory, usable=False).holds(manifest)
    elsewhere = msgspec.structs.replace(manifest, host="another")
    assert not await reader(trainer.directory).holds(elsewhere)
    with raises(WeightSyncError, host="another"):
        await read(reader(trainer.directory), elsewhere)
    crooked = msgspec.structs.replace(manifest, parts=(msgspec.structs.replace(manifest.parts[0], location="../x.lease"),))
    with raises(WeightSyncError, lease=ANY):
        await read(reader(trainer.directory), crooked)


def ranks_of(directory: Path, count: int) -> list[tuple[dict[str, torch.Tensor], SnapshotRing, IpcTransport]]:
    """For each rank the rows that it holds, their snapshots and its transport."""
    whole = Trainer(directory).parameters
    made = []
    for rank in range(count):
        held: list[Published] = []
        for name, w in whole.items():
            if not w.ndim:
                continue
            rows = -(-len(w) // count)
            first, end = (min(len(w), edge * rows) for edge in (rank, rank + 1))
            held.append(Published(name, w[first:end].clone(), w.dtype, tuple(w.shape), (first, *(0,) * (w.ndim - 1))))
        ring = SnapshotRing(held, CPU, slots=2, share=share, reader_patience_s=30.0)
        made.append(({one.name: one.held for one in held}, ring, reader(directory)))
    return made


async def test_ranks_hand_out_their_slices_where_they_lie(tmp_path: Path) -> None:
    """A reader opens the memory of all of them, and finds the version by its places; when one writes on, the version is gone."""
    ranks = ranks_of(tmp_path, 3)
    other = reader(tmp_path)
    manifests: list[Manifest] = []
    for number in range(3):
        given = [(transport, await asyncio.to_thread(ring.take)) for _, ring, transport in ranks]
        contributions = [await transport.contribute(Version(0, number), iter(shards)) for transport, shards in given]
        # Asked again, a rank says the same.
        assert await given[1][0].contribute(Version(0, number), iter(given[1][1])) == contributions[1]
        manifests.append(ranks[0][2].merge(contributions))
        whole = {name: torch.cat([held[name] for held, _, _ in ranks]) for name in ranks[0][0]}
        expected = {name: tensor_digest(w.reshape(-1).view(torch.uint8).numpy(), w.element_size()) for name, w in whole.items()}
        assert await read(other, manifests[-1]) == manifests[-1].digest == combine(expected)
        async with reader(tmp_path, sources=True).source(manifests[-1]) as source:
            assert isinstance(source, CudaSource)
            assert [memory.start for memory in source.memory] == sorted(piece.start for piece in manifests[-1].pieces)
            assert len({memory.owner for memory in source.memory}) == 3
        del given
        for held, ring, _ in ranks:
            ring.settle()
            for parameter in held.values():
                parameter.mul_(-1.5)
    assert [await other.holds(manifest) for manifest in manifests] == [False, True, True]
    with raises(WeightSyncError, gone="policy 0.0"):
        await read(other, manifests[0])
    # One rank that goes takes the version along.
    ranks[1][2].close()
    assert not await other.holds(manifests[-1])
    with raises(WeightSyncError, gone="policy 0.2"):
        await read(other, manifests[-1])


async def test_a_trainer_without_a_device_publishes_on_the_fallback_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transport = reader(tmp_path)
    shards = [msgspec.structs.replace(shard, data=shard.host()) for shard in Trainer(tmp_path).ring.take()]
    manifests = [await transport.publish(Version(0, number), iter(shards)) for number in range(2)]
    manifests.append(transport.merge([await transport.contribute(Version(0, 2), iter(shards))]))
    assert [(manifest.transport, await transport.holds(manifest)) for manifest in manifests] == [("shm", True)] * 3
    assert caplog.text.count("event=weights_ipc_unavailable") == 1


class HalfCopied:
    """A version whose device has copied the first bucket only: the rest is as a slow copy would leave it for a while."""

    def __init__(self, trainer: Trainer, manifest: Manifest) -> None:
        copying = manifest.parts[0].copying
        assert isinstance(copying, Copying)
        self.ends = copying.ends
        assert self.ends == (1280, manifest.nbytes)
        self._buffer = max(trainer.ring.buffers, key=lambda one: one.used)
        self._complete = self._buffer.memory.clone()
        self._buffer.marks[1:] -= 1
        self._buffer.memory[self.ends[0] : self.ends[-1]] = 0xEE

    def copy(self) -> None:
        for number, end in enumerate(self.ends[1:], 1):
            self._buffer.memory[self.ends[number - 1] : end] = self._complete[self.ends[number - 1] : end]
            self._buffer.marks[number] += 1


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.trainers.torch.snapshot.BUCKET_BYTES", 1500)
    monkeypatch.setattr("streamrl.weights.ipc.PIECE_BYTES", 256)


@pytest.mark.usefixtures("small_buckets")
async def test_a_version_is_read_while_it_is_copied(trainer: Trainer) -> None:
    """A reader gets what is marked, and the rest as it comes; buffers that held a version before are no different."""
    for number in range(1, 5):
        manifest = await trainer.publish(number)
        slow = HalfCopied(trainer, manifest)
        reading = asyncio.ensure_future(read(reader(trainer.directory), manifest))
        parts = reader(trainer.directory).fetch(manifest, slices(manifest))
        for start in range(0, 1280, 256):
            assert (await anext(parts)).start == start
        following = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0.05)
        assert not following.done() and not reading.done(), "what is not marked is not read"
        slow.copy()
        assert b"\xee" * 100 not in bytes((await following).data)
        assert await reading == manifest.digest == trainer.digest()
        await parts.aclose()  # type: ignore[attr-defined]
        trainer.step()


@pytest.mark.usefixtures("small_buckets")
async def test_a_version_that_is_replaced_while_it_is_waited_for_is_gone(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, slots=1, patience_s=0.05)
    manifest = await trainer.publish(1)
    HalfCopied(trainer, manifest)
    reading = asyncio.ensure_future(read(reader(tmp_path), manifest))
    await asyncio.sleep(0.02)
    trainer.step()
    newer = await trainer.publish(2)
    with raises(WeightSyncError, taken_back="policy 0.1"):
        await reading
    assert await read(reader(tmp_path), newer) == newer.digest


async def test_buckets_that_no_trainer_announces_are_refused_before_a_byte_is_read(trainer: Trainer) -> None:
    manifest = await trainer.publish(1)
    (part,) = manifest.parts
    copying = part.copying
    assert isinstance(copying, Copying)
    for ends, at in (((), 0), ((part.nbytes - 1,), copying.at), ((part.nbytes,), copying.at + 4), ((part.nbytes,), 0)):
        enemy = msgspec.structs.replace(part, copying=Copying(copying.stamp, at, ends))
        with raises(WeightSyncError, expected=part.nbytes):
            await read(reader(trainer.directory), msgspec.structs.replace(manifest, parts=(enemy,)))
        with raises(WeightSyncError, expected=part.nbytes):
            async with reader(trainer.directory, sources=True).source(msgspec.structs.replace(manifest, parts=(enemy,))):
                pass
    # Marks that lie beyond the buffer's end.
    enemy = msgspec.structs.replace(part, copying=msgspec.structs.replace(copying, at=copying.at + (1 << 20)))
    with raises(WeightSyncError, offset=copying.at + (1 << 20)):
        await read(reader(trainer.directory), msgspec.structs.replace(manifest, parts=(enemy,)))
