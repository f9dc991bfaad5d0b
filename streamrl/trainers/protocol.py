"""The trainer seam: SPMD, every rank calls every method in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec

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
    score: float | None = None
    """For a batch of the warm-up, which ends by it: mean probability of whole answers under the policy that the batch was trained from."""


class Trainer(Protocol):
    """One policy under training. Adapters: `torch`, `table` without any framework, and `LeadingTrainer` over several ranks."""

    def step(self, batch: TrainBatch) -> StepResult:
        """Train on one batch (one or several optimizer steps) with the loss that `batch.kind` names; raises TrainingError."""
        ...

    def digest(self) -> str:
        """Digest of the parameters as they are now, 16 hex digits: that of all `shards`, the same on every rank."""
        ...

    def shards(self) -> Iterator[Shard]:
        """This rank's parameters: a snapshot of them when the first is drawn at the latest, on the host or on a device."""
        ...

    def save(self, path: Path, extra: bytes, *, version: Version, beside: Mapping[str, bytes] | None = None) -> Future[None]:
        """Snapshot now, write in the background; resolves when the directory `path` is complete, synced, read back and in its place.

        `beside` are files of the caller's, by name, that are put there too.
        """
        ...

    def load(self, path: Path) -> bytes:
        """Restore parameters, optimizer and random state from `path`; returns what `save` got as `extra`.

        Raises:
            CheckpointDamaged: it is gone, or not what was written; nothing was restored.
            TrainingError: it is of another model.
        """
        ...

    def export(self, path: Path) -> None:
        """Write the policy as a model directory (Hugging Face, or a table's) at `path`, whole or not at all."""
        ...
