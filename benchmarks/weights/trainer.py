"""A trainer without training: weights of a model's shape on one device, which change at will and are published like any."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.shapes import Shape, parameters
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.tensors.digest_torch import NamedDigester, Region
from streamrl.trainers.torch.snapshot import Published, SnapshotRing
from streamrl.weights.ipc import IpcTransport
from streamrl.weights.protocol import Shard
from streamrl.weights.shm import ShmTransport

RUN, POLICY = "bench", "policy"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SPREAD = 0.02
"""Standard deviation of the random weights."""


class Handed(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is ready to be fetched; seconds of the monotonic clock."""

    manifest: Manifest
    publish_s: float
    released: asyncio.Future[float]
    """When the copy is over: the trainer may write to its weights."""
    announced_s: float


class _Part:
    """The rows that one device holds of all weights, as a rank of a trainer that is cut does: whole experts, and rows of all else."""

    def __init__(self, shape: Shape, device: torch.device, directory: Path, *, slots: int, rank: int, ranks: int) -> None:
        self.tensors, regions, published = dict[str, torch.Tensor](), dict[str, Region](), list[Published]()
        generator = torch.Generator(device).manual_seed(rank)
        dtype = getattr(torch, shape.dtype)
        for name, size in parameters(shape):
            rows = _rows(name, size, shape.experts, rank, ranks)
            if not rows:
                continue
            tensor = torch.empty((len(rows), *size[1:]), dtype=dtype, device=device).normal_(0.0, _SPREAD, generator=generator)
            self.tensors[name] = tensor.add_(1.0) if len(size) == 1 else tensor
            offset = (rows.start, *(0,) * (len(size) - 1))
            regions[name] = Region(tensor, size, offset)
            published.append(Published(name, tensor, dtype, size, offset))
        self.device = device
        self.digester = NamedDigester(regions)
        self.known = self.digester.digests()
        self.ring = SnapshotRing(published, device, slots=slots)
        shm = ShmTransport(run=RUN, policy=POLICY, directory=directory, rank=rank)
        ipc = device.type == "cuda"
        self.transport = IpcTransport(run=RUN, policy=POLICY, directory=directory, fallback=shm) if ipc else shm

    def take(self) -> list[Shard]:
        shards = self.ring.take(self.known)
        self.ring.settle()
        return shards

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class SyntheticTrainer:
    """Random weights in two contents that `step` switches between: every element changes its sign.

    Args:
        shape: the model.
        devices: where its weights are; several have rows of them each, and publish them as ranks do.
        directory: for the transport's files.
        slots: snapshots that may be out at once.
    """

    def __init__(self, shape: Shape, devices: Sequence[torch.device], directory: Path, *, slots: int) -> None:
        count = len(devices)
        self._parts = [_Part(shape, device, directory, slots=slots, rank=rank, ranks=count) for rank, device in enumerate(devices)]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by name, of a trainer that has them on one device."""
        (part,) = self._parts
        return part.tensors

    @property
    def transport(self) -> IpcTransport | ShmTransport:
        """What engines fetch from."""
        return self._parts[0].transport

    def step(self, *, spread_s: float = 0.0) -> None:
        """Change all weights; with `spread_s` in small pieces over about so many seconds (where an engine uses the same device)."""
        total = sum(len(part.tensors) for part in self._parts)
        for part in self._parts:
            part.ring.settle()
            with torch.no_grad():
                for tensor in part.tensors.values():
                    tensor.neg_()
                    if spread_s:
                        time.sleep(spread_s / total)
            part.synchronize()
            # As a trainer does for its ledger: they are known when the weights are handed over.
            part.known = part.digester.digests()

    async def publish(self, version: Version) -> Handed:
        """Take a snapshot and put it where engines fetch it."""
        publish_s = time.monotonic()
        taken = await asyncio.gather(*(asyncio.to_thread(part.take) for part in self._parts))
        released = asyncio.ensure_future(asyncio.to_thread(self._released))
        if len(self._parts) == 1:
            manifest = await self.transport.publish(version, iter(taken[0]))
        else:
            given = zip(self._parts, taken, strict=True)
            made = await asyncio.gather(*(part.transport.contribute(version, iter(shards)) for part, shards in given))
            manifest = await asyncio.to_thread(self.transport.merge, made)
        return Handed(manifest=manifest, publish_s=publish_s, released=released, announced_s=time.monotonic())

    async def retire(self, older_than: Version) -> None:
        """Free what older versions hold."""
        for part in self._parts:
            await part.transport.retire(older_than)

    def _released(self) -> float:
        for part in self._parts:
            part.synchronize()
        return time.monotonic()


def _rows(name: str, size: Sequence[int], experts: int, rank: int, ranks: int) -> range:
    """Rows of a tensor that a rank holds."""
    if (match := _EXPERT.search(name)) is not None:
        return range(size[0] if int(match[1]) * ranks // experts == rank else 0)
    each = -(-size[0] // ranks)
    return range(min(size[0], rank * each), min(size[0], (rank + 1) * each))
