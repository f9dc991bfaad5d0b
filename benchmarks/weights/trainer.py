"""A trainer without training: weights of a model's shape on one device, which change at will and are published like any."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import torch

from benchmarks.shapes import Shape, parameters
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.tensors.digest_torch import NamedDigester
from streamrl.trainers.torch.snapshot import SnapshotRing
from streamrl.weights.ipc import IpcTransport
from streamrl.weights.protocol import Shard
from streamrl.weights.shm import ShmTransport

RUN, POLICY = "bench", "policy"
_SPREAD = 0.02
"""Standard deviation of the random weights."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is ready to be fetched; seconds of the monotonic clock."""

    manifest: Manifest
    publish_s: float
    released: asyncio.Future[float]
    """When the copy is over: the trainer may write to its weights."""
    announced_s: float


class SyntheticTrainer:
    """Random weights in two contents that `step` switches between: every element changes its sign.

    Args:
        shape: the model.
        device: where its weights are.
        directory: for the transport's files.
        slots: snapshots that may be out at once.
    """

    def __init__(self, shape: Shape, device: torch.device, directory: Path, *, slots: int) -> None:
        self.tensors = _random(shape, device)
        self._device = device
        self._digester = NamedDigester(self.tensors)
        self._known = self._digester.digests()
        self._ring = SnapshotRing(list(self.tensors.items()), device, slots=slots)
        shm = ShmTransport(run=RUN, policy=POLICY, directory=directory)
        ipc = device.type == "cuda"
        self.transport = IpcTransport(run=RUN, policy=POLICY, directory=directory, fallback=shm) if ipc else shm

    def step(self, *, spread_s: float = 0.0) -> None:
        """Change all weights; with `spread_s` in small pieces over about so many seconds (where an engine uses the same device)."""
        self._ring.settle()
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.neg_()
                if spread_s:
                    time.sleep(spread_s / len(self.tensors))
        self._synchronize()
        # As a trainer does for its ledger: they are known when the weights are handed over.
        self._known = self._digester.digests()

    async def publish(self, version: Version) -> Published:
        """Take a snapshot and put it where engines fetch it."""
        publish_s = time.monotonic()
        shards = await asyncio.to_thread(self._take)
        released = asyncio.ensure_future(asyncio.to_thread(self._released))
        manifest = await self.transport.publish(version, iter(shards))
        return Published(manifest=manifest, publish_s=publish_s, released=released, announced_s=time.monotonic())

    async def retire(self, older_than: Version) -> None:
        """Free what older versions hold."""
        await self.transport.retire(older_than)

    def _take(self) -> list[Shard]:
        shards = self._ring.take(self._known)
        self._ring.settle()
        return shards

    def _released(self) -> float:
        self._synchronize()
        return time.monotonic()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _random(shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights like those of a fresh model: norms about 1, the rest about 0."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in parameters(shape):
        tensor = torch.empty(size, dtype=dtype, device=device).normal_(0.0, _SPREAD, generator=generator)
        tensors[name] = tensor.add_(1.0) if len(size) == 1 else tensor
    return tensors
