"""One update at a time, in each of the ways that are compared."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.weights.engine import BenchEngine
from benchmarks.weights.options import STOCK, Mode
from benchmarks.weights.records import UpdateRecord
from benchmarks.weights.stock import StockEngine, tensor_payload, write_checkpoint
from benchmarks.weights.trainer import SyntheticTrainer
from streamrl.errors import StreamRLError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest

KEPT = 2
"""Versions whose bytes stay, as a trainer would keep a few."""


class Updates:
    """Numbers the versions and brings them into the engine.

    Args:
        trainer: changes its weights before each update.
        engine: takes them.
        stock: the engine's own update endpoints.
        model_dir: its configuration goes into checkpoints.
        scratch: folder for checkpoints.
        spread_s: time that a change of the trainer's weights may take where both share a device.
    """

    def __init__(
        self, trainer: SyntheticTrainer, engine: BenchEngine, stock: StockEngine, *, model_dir: Path, scratch: Path, spread_s: float
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._stock = stock
        self._model_dir = model_dir
        self._scratch = scratch
        self._spread_s = spread_s
        self._number = 0
        self._copies: dict[str, torch.Tensor] = {}
        self._last: Manifest | None = None

    @asynccontextmanager
    async def connected(self, modes: Set[Mode]) -> AsyncGenerator[None]:
        """What updates of these modes need beforehand, until the context is left."""
        if Mode.DISTRIBUTED not in modes:
            yield
            return
        tensors = self._trainer.tensors
        async with self._stock.group(next(iter(tensors.values())).device, tensors):
            yield

    async def apply(self, mode: Mode, window: int, *, change: bool = True, digest: bool = False) -> UpdateRecord:
        """Make one update; what fails is in the record's `error`.

        Args:
            mode: how.
            window: for the record.
            change: change the trainer's weights first; otherwise the same bytes go out under a new number.
            digest: have every rank digest what it serves afterwards (costs a pass over all weights).
        """
        self._number += 1
        version = Version(0, self._number)
        start_s = time.monotonic()
        try:
            if change:
                await asyncio.to_thread(self._trainer.step, spread_s=self._spread_s)
            start_s = time.monotonic()
            if mode in STOCK:
                return await self._with_stock(mode, window, version)
            return await self._with_ours(mode, window, version, digest=digest)
        except (StreamRLError, OSError, RuntimeError) as error:
            # A device or a disk that is full (torch says so by RuntimeError) ends this update, and the others show what they show.
            return _record(window, mode, version, start_s, done_s=time.monotonic(), error=f"{type(error).__name__}: {error}")

    async def digested(self, record: UpdateRecord) -> UpdateRecord:
        """The newest version's record with the digest of what every rank serves now."""
        assert self._last is not None
        try:
            digest = await self._engine.served_digest(self._last)
        except StreamRLError as error:
            return msgspec.structs.replace(record, error=str(error))
        return msgspec.structs.replace(record, served_digest=[digest] * self._engine.tensor_parallel)

    async def _with_ours(self, mode: Mode, window: int, version: Version, *, digest: bool) -> UpdateRecord:
        published = await self._trainer.publish(version)
        async with self._trainer.transport.source(published.manifest) as source:
            staged = await self._engine.stage(published.manifest, source, paced=mode is Mode.PACED)
        staged_s = time.monotonic()
        commits = await self._engine.commit(version, copy=mode is Mode.COPY)
        done_s = time.monotonic()
        self._last = published.manifest
        record = UpdateRecord(
            window=window,
            mode=mode,
            version=str(version),
            publish_s=published.publish_s,
            released_s=await published.released,
            announced_s=published.announced_s,
            staged_s=staged_s,
            commit_s=max(commit.at_s for commit in commits),
            done_s=done_s,
            stage_ms=[rank.took_ms for rank in staged],
            commit_ms=[commit.host_ms for commit in commits],
            nbytes=[rank.nbytes for rank in staged],
            forwards=[commit.forward for commit in commits],
            manifest_digest=published.manifest.digest,
        )
        if digest:
            record = await self.digested(record)
        await self._trainer.retire(Version(0, max(0, version.number - KEPT)))
        return record

    async def _with_stock(self, mode: Mode, window: int, version: Version) -> UpdateRecord:
        tensors = await asyncio.to_thread(self._beside_engine) if mode is Mode.TENSOR else self._trainer.tensors
        start_s = time.monotonic()
        if mode is Mode.DISTRIBUTED:
            paused = await self._stock.update_from_distributed(tensors)
            ready_s = paused.paused_s
        elif mode is Mode.TENSOR:
            payload = await asyncio.to_thread(tensor_payload, tensors)
            ready_s = time.monotonic()
            paused = await self._stock.update_from_tensor(payload)
        else:
            folder = self._scratch / f"checkpoint-{version.number}"
            await asyncio.to_thread(write_checkpoint, folder, self._model_dir / "config.json", tensors)
            ready_s = time.monotonic()
            paused = await self._stock.update_from_disk(folder)
            await asyncio.to_thread(shutil.rmtree, folder)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        return _record(
            window,
            mode,
            version,
            paused.continued_s,
            publish_s=start_s,
            announced_s=paused.pause_s,
            staged_s=ready_s,
            nbytes=[nbytes] * self._engine.tensor_parallel,
        )

    def _beside_engine(self) -> dict[str, torch.Tensor]:
        """The weights on the engine's own device if they fit there too: stock's best case, so moving them is not counted as its time."""
        tensors, device = self._trainer.tensors, self._engine.device
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        elsewhere = any(tensor.device != device for tensor in tensors.values())
        if device.type == "cuda" and elsewhere and self._engine.tensor_parallel == 1:
            if not self._copies and torch.cuda.mem_get_info(device)[0] > nbytes * 1.1:
                self._copies = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
            for name, copy in self._copies.items():
                copy.copy_(tensors[name])
            torch.cuda.synchronize(device)
        return self._copies or tensors


def _record(window: int, mode: Mode, version: Version, at_s: float, **known: Any) -> UpdateRecord:
    """A record whose times are all `at_s`, but for those that are known."""
    times = dict.fromkeys(("publish_s", "released_s", "announced_s", "staged_s", "commit_s", "done_s"), at_s)
    fields: dict[str, Any] = {**times, **known}
    return UpdateRecord(window=window, mode=mode, version=str(version), **fields)
