"""Snapshots on a GPU and transport `ipc` between processes, and between GPUs where there are two. `scripts/gpu/tests.sh` runs them."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Contribution, Manifest
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.tensors.digest_torch import NamedDigester
from streamrl.trainers.torch.snapshot import Buffer, SnapshotRing
from streamrl.weights.ipc import IpcTransport
from streamrl.weights.manifest import Content
from streamrl.weights.ranks import merge
from streamrl.weights.shm import ShmTransport
from tests.support.needs import need

pytestmark = pytest.mark.gpu


class Trainer:
    """200 MB of parameters on a GPU, half of them bfloat16."""

    def __init__(self, directory: Path, *, slots: int = 2, gpu: int = 0) -> None:
        device = torch.device("cuda", gpu)
        generator = torch.Generator(device).manual_seed(0)
        self.parameters = {f"layers.{i}.weight": torch.randn(1000, 5001, generator=generator, device=device).bfloat16() for i in range(10)}
        self.parameters |= {f"norm.{i}": torch.randn(4099, generator=generator, device=device) for i in range(5)}
        self.parameters["head"] = torch.randn(5000, 5000, generator=generator, device=device)
        self.ring = SnapshotRing(list(self.parameters.items()), device, slots=slots)
        shm = ShmTransport(run="r", policy="policy", directory=directory)
        self.transport = IpcTransport(run="r", policy="policy", directory=directory, fallback=shm)

    def digest(self) -> str:
        """By way of the host."""
        return combine(
            {n: tensor_digest(p.cpu().reshape(-1).view(torch.uint8).numpy(), p.element_size()) for n, p in self.parameters.items()}
        )

    def step(self) -> None:
        self.ring.settle()
        for parameter in self.parameters.values():
            parameter.mul_(-1.0625)

    async def publish(self, number: int) -> Manifest:
        return await self.transport.publish(Version(0, number), self.ring.shards())


@asynccontextmanager
async def engine(directory: Path, gpu: int) -> AsyncIterator[Process]:
    """A process with a GPU of its own (also the trainer's) that answers each manifest with the digest of what it read."""
    command = [sys.executable, str(Path(__file__).with_name("ipc_gpu_reader.py")), str(directory), str(gpu)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ask(process: Process, manifest: Manifest, way: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{way} {msgspec.msgpack.encode(manifest).hex()}\n".encode())
    return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("gpu", [0, 1])
def test_engines_read_snapshots_while_the_trainer_goes_on(tmp_path: Path, gpu: int) -> None:
    need("two gpus" if gpu else "gpu")
    asyncio.run(read_while_training(tmp_path, gpu))


async def read_while_training(tmp_path: Path, gpu: int) -> None:
    trainer = Trainer(tmp_path)
    async with engine(tmp_path, gpu) as process:
        seen: list[str] = []
        for number in range(5):
            digest = trainer.digest()
            manifest = await trainer.publish(number)
            trainer.step()
            assert manifest.digest == digest
            # On the device as SGLang's staging reads it, and on the host as the local engine does.
            assert await ask(process, manifest, "device") == digest
            assert await ask(process, manifest, "host") == digest
            seen.append(digest)
        assert len(set(seen)) == 5
        gone = msgspec.structs.replace(manifest, parts=(msgspec.structs.replace(manifest.parts[0], handle=b"\x95no"),))
        assert (await ask(process, gone, "device")).startswith("error expected a CUDA")


@pytest.mark.parametrize("gpu", [0, 1])
def test_engines_begin_to_read_while_the_copy_is_under_way(tmp_path: Path, gpu: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """About a second passes on the device between two buckets: the manifest is out before, and what is read is complete."""
    need("two gpus" if gpu else "gpu")
    monkeypatch.setattr("streamrl.trainers.torch.snapshot.BUCKET_BYTES", 32 << 20)
    copy = SnapshotRing.copy_bucket

    def slowly(ring: SnapshotRing, buffer: Buffer, number: int) -> None:
        if number in (1, 3):
            torch.cuda._sleep(1_000_000_000)
        copy(ring, buffer, number)

    monkeypatch.setattr(SnapshotRing, "copy_bucket", slowly)
    asyncio.run(read_while_copying(tmp_path, gpu))


async def read_while_copying(tmp_path: Path, gpu: int) -> None:
    trainer = Trainer(tmp_path)
    async with engine(tmp_path, gpu) as process:
        for number in range(4):
            digest = trainer.digest()
            known = NamedDigester(trainer.parameters).digests()
            manifest = await trainer.transport.publish(Version(0, number), trainer.ring.shards(known))
            assert not trainer.ring._copied.query()
            assert manifest.digest == digest
            assert await ask(process, manifest, "host" if number % 2 else "device") == digest
            trainer.step()


def test_a_killed_engine_and_a_killed_trainer(tmp_path: Path) -> None:
    asyncio.run(kill_both(tmp_path))


async def kill_both(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, slots=1)
    async with engine(tmp_path, 0) as process:
        assert await ask(process, await trainer.publish(1), "hold") == "held"
        process.kill()
        await process.wait()
    trainer.step()
    assert (await trainer.publish(2)).digest == trainer.digest()
    trainer.transport.close()
    async with engine(tmp_path, 0) as process:
        successor = Trainer(tmp_path)
        manifest = await successor.publish(3)
        assert await ask(process, manifest, "device") == manifest.digest


@asynccontextmanager
async def rank_of(directory: Path, rank: int, ranks: int) -> AsyncIterator[Process]:
    """A process that holds rows of a model, on a GPU of its own where there are so many."""
    gpu = rank % torch.cuda.device_count()
    command = [sys.executable, str(Path(__file__).with_name("ipc_gpu_rank.py")), str(directory), str(rank), str(ranks), str(gpu)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=1 << 24)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def tell(process: Process, line: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{line}\n".encode())
    return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_engine_reads_the_parts_that_ranks_hand_out(tmp_path: Path, ranks: int) -> None:
    """Rounded from float32 by the copy; digests of parts made on the device add up to that of the bytes that arrive."""
    asyncio.run(read_parts(tmp_path, ranks))


async def read_parts(tmp_path: Path, ranks: int) -> None:
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(rank_of(tmp_path, rank, ranks)) for rank in range(ranks)]
        reader = await stack.enter_async_context(engine(tmp_path, 0))
        seen: list[str] = []
        for number in range(4):
            said = [await tell(process, f"publish {number}") for process in processes]
            manifest = merge([msgspec.msgpack.decode(bytes.fromhex(one), type=Contribution) for one in said])
            manifest = msgspec.structs.replace(manifest, links={})
            # The next step writes the parameters while the version is read.
            assert [await tell(process, "step") for process in processes] == ["stepped"] * ranks
            assert await ask(reader, manifest, "device") == manifest.digest
            assert await ask(reader, manifest, "host") == manifest.digest
            seen.append(manifest.digest)
        assert len(set(seen)) == 4
        processes[-1].kill()
        await processes[-1].wait()
        said = await ask(reader, manifest, "device")
        assert said.startswith("error policy 0.3: ") and "a newer version" in said


def test_no_snapshot_is_torn_by_the_steps_after_it(tmp_path: Path) -> None:
    """Twenty snapshots, each digested and read by way of pinned memory after the parameters have been written again."""
    trainer = Trainer(tmp_path)
    for _ in range(20):
        expected = trainer.digest()
        shards = trainer.ring.take()
        for _ in range(3):
            trainer.step()
        content = Content(shards)
        assert content.digest == expected
        out = np.empty(content.nbytes, np.uint8)
        content.fill(0, out)
        found = {t.name: tensor_digest(out[t.offset : t.offset + t.nbytes], 2 if t.dtype == "bfloat16" else 4) for t in content.tensors}
        assert combine(found) == expected


def test_the_training_stream_does_not_wait_for_a_snapshot(tmp_path: Path) -> None:
    """Work that was queued before the snapshot is still running when `take` has returned."""
    trainer = Trainer(tmp_path)
    trainer.ring.take()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the GPU's clock
    busy = torch.cuda.Event()
    busy.record()
    shards = trainer.ring.take()
    assert not busy.query()
    assert Content(shards).digest == trainer.digest()


def test_host_transports_get_the_same_bytes(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    shm = ShmTransport(run="r", policy="policy", directory=tmp_path / "host")
    digest = trainer.digest()
    manifest = asyncio.run(shm.publish(Version(0, 1), trainer.ring.shards()))
    trainer.step()
    assert manifest.digest == digest
    data = np.fromfile(tmp_path / "host" / manifest.parts[0].location, np.uint8)
    found = {t.name: tensor_digest(data[t.offset : t.offset + t.nbytes], 2 if t.dtype == "bfloat16" else 4) for t in manifest.tensors}
    assert combine(found) == digest
