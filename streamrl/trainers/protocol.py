"""The trainer seam: SPMD, every rank calls every method in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.algorithms.objective import SOME, Gradient
from streamrl.core.batches import TrainBatch
from streamrl.errors import OutOfMemory, WeightsDiverged
from streamrl.schemas.ledger import Choices
from streamrl.schemas.versions import Version
from streamrl.weights.protocol import Shard

MEND = (
    "lower trainer.optimizer.learning_rate or clip_norm, or bound the rewards; a new run with --name NAME, or a branch from before: "
    "streamrl replay RUN --from V --set trainer.optimizer.learning_rate=..."
)
"""What to do about weights that diverged."""


class TokenValues(msgspec.Struct, frozen=True, eq=False):
    """Of the tokens of a batch, [T] each; what stands at tokens that were not trained means nothing."""

    logprobs: npt.NDArray[np.float64]
    """Of the policy under training, at the optimizer step that trained the token."""
    weights: npt.NDArray[np.float64]
    """What the policy loss was multiplied by."""
    advantages: npt.NDArray[np.float64]
    """Those that the policy loss was given."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenValues):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name), equal_nan=True) for name in self.__struct_fields__)

    __ne__ = object.__ne__
    """The opposite; msgspec's own goes by identity."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class StepResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one batch did. `metrics` are already reduced over ranks and micro-batches.

    Two are equal that came to the same digits, whatever their times and notices, which tell of the memory that was free.
    """

    digest: str
    """Digest of the parameters after the step, 16 hex digits."""
    metrics: dict[str, float]
    times: dict[str, float] = {}
    """Seconds of the step's parts by metric, as this rank has measured them; of a backend that has none apart, none."""
    finite: bool = True
    """False when a gradient was not finite and the update was skipped, or when no trained token had finite log-probs and advantage."""
    gradient: Gradient = SOME
    """Says what the policy got."""
    fault: str = ""
    """Says why the policy got no gradient; of one that is not finite, what a function of the user's has to do with it; empty: nothing."""
    score: float | None = None
    """For a batch of the warm-up, which ends by it: mean probability of whole answers under the policy that the batch was trained from."""
    reference: str = ""
    """Digest of the reference's parameters, where it is renewed (`loss.kl.reference_every`)."""
    micro_tokens: int = 0
    """Budget that the batch was cut by: the one asked for, or less where that was out of memory; 0 of a backend that cuts none."""
    peak_s: float | None = None
    """Seconds that the useful FLOPs take at the peak of all ranks' devices (`streamrl.trainers.flops`); None where either is unknown or the
    critic alone learns."""
    choices: Choices | None = None
    """How it was computed; None: as the defaults of `Choices` say."""
    notices: tuple[str, ...] = ()
    """What people should know of how it is computed from here on, once."""
    tokens: TokenValues | None = None
    """None for demonstrations, and where the loss has no weight of single tokens."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepResult):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__struct_fields__ if name not in ("times", "notices"))

    __ne__ = object.__ne__
    """The opposite; msgspec's own goes by identity."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def not_finite(norm: float, learning_rate: float) -> WeightsDiverged:
    """The error for an update that made a parameter infinite or NaN."""
    return WeightsDiverged(
        f"the weights diverged: parameters are not finite after an update at rate {learning_rate:g} by a gradient of norm {norm:g}",
        hint=MEND,
    )


def out_of_memory(batch: TrainBatch, tokens: int, half: int, longest: int, said: str) -> OutOfMemory:
    """The error for a step that is out of memory.

    Args:
        batch: whose step.
        tokens: of a micro-batch that were tried.
        half: what to begin again with; 0: no less would help.
        longest: tokens of the longest sample.
        said: by the device.
    """
    if half:
        hint = f"it begins again from its checkpoint with {half}; lower trainer.micro_tokens to spare that"
    else:
        hint = "set trainer.activations = 0, lower sampling.max_new_tokens, or train on a larger device"
    return OutOfMemory(
        f"out of memory in the step from version {batch.version} with micro-batches of {tokens} tokens, the longest sample has {longest}"
        f"{'' if half else ', which must fit into one'}: {said}",
        hint=hint,
        micro_tokens=half,
        number=batch.version.number + 1,
    )


class Trainer(Protocol):
    """One policy under training. Adapters: `torch`, `table` without any framework, and `LeadingTrainer` over several ranks."""

    def step(self, batch: TrainBatch) -> StepResult:
        """Train on one batch (one or several optimizer steps) with the loss that `batch.kind` names.

        Raises:
            TrainingError: the batch cannot be trained on.
            OutOfMemory: the device has not enough memory for it, and the step cannot be repeated.
            WeightsDiverged: a parameter is not finite any more.
        """
        ...

    def digest(self) -> str:
        """Digest of the parameters as they are now, 16 hex digits: that of all `shards`, the same on every rank."""
        ...

    def shards(self) -> Iterator[Shard]:
        """What this rank holds, rows of each parameter or all: a snapshot when the first is drawn at the latest, on host or device."""
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
