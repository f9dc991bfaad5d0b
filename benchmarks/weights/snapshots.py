"""What a version costs a trainer on a GPU, and how fast an engine on this host has it: snapshot, digest, hand-over, host copy.

`python -m benchmarks.weights.snapshots 8B --trainer-gpu 0 --engine-gpu 1` prints a JSON object with the numbers; nothing decodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.processes import child
from benchmarks.shapes import Shape, parameters, shape_of
from streamrl.errors import LaunchError
from streamrl.schemas.codec import encode
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.tensors.digest_torch import NamedDigester
from streamrl.trainers.torch.snapshot import SnapshotRing
from streamrl.weights.ipc import IpcTransport
from streamrl.weights.manifest import Content
from streamrl.weights.shm import ShmTransport

HOST_BYTES = 4 << 30
"""At most this much is copied to the host: enough for a rate."""


async def measure_snapshots(shape: Shape, directory: Path, *, trainer_gpu: int = 0, engine_gpu: int = 0, rounds: int = 8) -> dict[str, Any]:
    """Measure on this host's GPUs; the engine is a process of its own, also where both have one GPU.

    Args:
        shape: of the model; its parameters are random.
        directory: an empty folder for leases.
        trainer_gpu: holds the parameters and two snapshots.
        engine_gpu: holds what the engine reads.
        rounds: versions published.

    Returns:
        Medians over the rounds, `*_ms` in milliseconds and `*_gbs` in 10^9 bytes a second:
        `take`: host time of the training thread, until the copy is under way;
        `copy`: on the device (bytes read and written); a write to the parameters waits for it at most;
        `digest`: of the parameters, after a training step;
        `publish`: from the snapshot's beginning to its manifest: the first bucket's copy, the lease;
        `fetch`: the engine's process: lease, copy to a buffer of its own device, wait; `first_fetch`: with the buffer's first opening;
        `total`: from the snapshot's beginning to the engine's answer;
        `host`: by way of pinned memory to ordinary memory, for all bytes at the rate that was measured.

    Raises:
        LaunchError: the engine's process failed.
    """
    device = torch.device("cuda", trainer_gpu)
    torch.cuda.set_device(device)
    dtype = getattr(torch, shape.dtype)
    weights = [(name, torch.randn(size, device=device, dtype=dtype)) for name, size in parameters(shape)]
    ring = SnapshotRing(weights, device, slots=2)
    shm = ShmTransport(run="bench", policy="policy", directory=directory)
    transport = IpcTransport(run="bench", policy="policy", directory=directory, fallback=shm)
    digester = NamedDigester(dict(weights))
    digest_ms = [_timed(digester.digests) for _ in range(3)][-1]
    rows: list[dict[str, float]] = []
    nbytes = 0
    async with _engine(directory, engine_gpu) as engine:
        for number in range(rounds + 2):
            manifest, copied, row = await _publish(transport, ring, digester, device, number)
            nbytes = manifest.nbytes
            fetched, digest = await _fetch(engine, manifest)
            began = row.pop("began")
            row |= {"fetch_ms": fetched, "total_ms": 1e3 * time.perf_counter() - began, "copy_ms": await copied - began}
            if digest != manifest.digest:
                raise LaunchError(f"expected version {number} with digest {manifest.digest} at the engine, got {digest}")
            rows.append(row)
            for _, tensor in weights:
                tensor.neg_()
    host_ms = _host_ms(ring, nbytes)
    # Each of the two buffers is opened for the first time once.
    first, rest = rows[0]["fetch_ms"], rows[2:]
    median = {name: statistics.median(row[name] for row in rest) for name in rows[0]}
    milliseconds = {**median, "digest_ms": digest_ms, "first_fetch_ms": first, "host_ms": host_ms}
    moved = {"copy": 2 * nbytes, "digest": nbytes, "fetch": nbytes, "host": nbytes}
    return {
        "shape": shape.name,
        "nbytes": nbytes,
        "trainer": f"{torch.cuda.get_device_name(device)} {trainer_gpu}",
        "engine": f"{torch.cuda.get_device_name(engine_gpu)} {engine_gpu}",
        "rounds": rounds,
        **milliseconds,
        **{f"{name}_gbs": count / milliseconds[f"{name}_ms"] / 1e6 for name, count in moved.items()},
    }


async def _publish(
    transport: IpcTransport, ring: SnapshotRing, digester: NamedDigester, device: torch.device, number: int
) -> tuple[Manifest, asyncio.Task[float], dict[str, float]]:
    ring.settle()
    known = digester.digests()  # as a trainer has them of its step
    torch.cuda.synchronize(device)
    began = 1e3 * time.perf_counter()
    shards = ring.take(known)
    taken = 1e3 * time.perf_counter()
    # The current stream waits for the copy as an optimizer step would.
    ring.settle()
    copied = asyncio.create_task(asyncio.to_thread(_synchronized_ms, device))
    manifest = await transport.publish(Version(0, number), iter(shards))
    published = 1e3 * time.perf_counter()
    return manifest, copied, {"began": began, "take_ms": taken - began, "publish_ms": published - began}


def _synchronized_ms(device: torch.device) -> float:
    torch.cuda.default_stream(device).synchronize()
    return 1e3 * time.perf_counter()


def _host_ms(ring: SnapshotRing, nbytes: int) -> float:
    content = Content(ring.take())
    out = np.empty(min(nbytes, HOST_BYTES), np.uint8)
    out[:] = 0  # pages that are there
    content.fill(0, out[: 64 << 20])
    return _timed(lambda: content.fill(0, out)) * nbytes / len(out)


def _timed(work: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def _engine(directory: Path, gpu: int) -> AsyncGenerator[Process]:
    command = child("benchmarks.weights.snapshot_reader", directory, gpu)
    process = await asyncio.create_subprocess_exec(*command["args"], env=command["env"], stdin=PIPE, stdout=PIPE, limit=1 << 24)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _fetch(engine: Process, manifest: Manifest) -> tuple[float, str]:
    assert engine.stdin is not None and engine.stdout is not None
    engine.stdin.write(encode(manifest).hex().encode() + b"\n")
    line = (await engine.stdout.readline()).decode().split()
    if len(line) != 2:
        raise LaunchError("the engine's process failed", hint="its error stands above")
    return float(line[0]), line[1]


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.weights.snapshots", description="What publishing a version costs on this host.")
    parser.add_argument("shape", nargs="+", help="tiny, 0.6B, 4B, 8B, 30B-A3B")
    parser.add_argument("--trainer-gpu", type=int, default=0)
    parser.add_argument("--engine-gpu", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args(arguments)
    for name in given.shape:
        with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as directory:
            numbers = asyncio.run(
                measure_snapshots(
                    shape_of(name), Path(directory), trainer_gpu=given.trainer_gpu, engine_gpu=given.engine_gpu, rounds=given.rounds
                )
            )
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(numbers)).decode() + "\n")
        sys.stdout.flush()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
