"""The trainer seam: SPMD, every rank calls every method in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec

from streamrl.config.registry import Role
from streamrl.core.batches import TrainBatch
from streamrl.schemas.versions import Version
from streamrl.weights.protocol import Shard


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one batch did. `metrics` are already reduced over ranks and micro-batches."""

    digest: str
    """Digest of the parameters after the step, 16 hex digits."""
    metrics: dict[str, float]
    finite: bool = True
    """False when a gradient was not finite and the update was skipped."""


class Trainer(Protocol):
    """One policy under training. Adapters: `torch` and, without any framework, `table`."""

    def score(self, batch: TrainBatch, role: Role) -> Any:
        """Log-probs (for `value`: values) [T] float32 of the batch's packed tokens; 0.0 at the first token of each sequence."""
        ...

    def step(self, batch: TrainBatch) -> StepResult:
        """Train on one batch (one or several optimizer steps) with the loss that `batch.kind` names; raises TrainingError."""
        ...

    def shards(self) -> Iterator[Shard]:
        """This rank's parameters: a snapshot of them when the first is drawn at the latest, on the host or on a device."""
        ...

    def save(self, path: Path, extra: bytes, *, version: Version) -> Future[None]:
        """Snapshot now, write in the background; resolves when the directory `path` is complete, synced and renamed into place."""
        ...

    def load(self, path: Path) -> bytes:
        """Restore parameters, optimizer and random state from `path`; returns what `save` got as `extra`."""
        ...
