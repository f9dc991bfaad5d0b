"""One version, as a live trainer, a replay, a branch and a tap make it.

```text
books.at      what is known of it already                                       ledger, or nothing
fold.next     the batch that is due, from records in stream order               StreamFold: live, replay    BranchFold: branch, tap
trainer.step
books.enter   into the ledger, or held against it; gives the version's name     ledger_books: live, tap; a report; a file
```

The fold owns the state. Nobody else sets it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import UnsetType
from msgspec.structs import replace

from streamrl.algorithms.batch_metrics import staleness_metrics
from streamrl.consumers.training.divergence import unlearned
from streamrl.core.assembly import PARTS, ages, parts_of_ages, used
from streamrl.core.batches import STATUS_CODES, TrainBatch
from streamrl.core.fold import Batch
from streamrl.core.state import FoldState
from streamrl.errors import BatchDiffers
from streamrl.schemas.ledger import Choices, LedgerEntry, Used
from streamrl.schemas.samples import Status
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import dropped_tokens, reward_part, staleness_part
from streamrl.trainers.protocol import StepResult, Trainer

logger = logging.getLogger(__name__)


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """One trained batch."""

    before: FoldState
    """On which the batch was closed."""
    state: FoldState
    """After it, known by the version that it made."""
    batch: Batch
    arrays: TrainBatch
    result: StepResult
    reward: float | None
    """See `mean_reward`."""
    metrics: dict[str, float]
    past: LedgerEntry | None = None
    """What the books had for the same version number: it was trained before."""
    beside: LedgerEntry | None = None
    """For a branch or a tap, the parent's entry at which the batch was closed."""


def same_result(result: StepResult, entry: LedgerEntry) -> bool:
    """Whether a step gave the parameters that an entry has: the policy's, and the reference's where that is renewed."""
    return (result.digest, result.reference) == (entry.digest, known_reference(entry))


def known_reference(entry: LedgerEntry) -> str:
    """Digest of the reference that an entry has; empty: none."""
    return "" if isinstance(entry.reference, UnsetType) else entry.reference


class Entries(Protocol):
    """What has been trained before."""

    def at(self, number: int) -> LedgerEntry | None:
        """The entry that made version `number`, if there is one."""
        ...


class Books(msgspec.Struct, frozen=True):
    """Where versions are written down, or held against what is there."""

    at: Callable[[int], LedgerEntry | None]
    """The entry that made a version number, when that has been trained before."""
    enter: Callable[[Stepped], Version]
    """Takes a version in, by the rules of whoever trains; gives the version that it is known by."""
    hint: str = ""
    """What else may be the cause when a batch is not the one in the books."""


class Folding(Protocol):
    """Folds the stream, closes batches, and owns the state that both come from."""

    @property
    def own(self) -> FoldState:
        """The state that the next batch is closed on."""
        ...

    @property
    def beside(self) -> LedgerEntry | None:
        """See `Stepped.beside`."""
        ...

    def next(self, past: LedgerEntry | None, stop: Callable[[], bool]) -> Batch | None:
        """The batch that is due next; None when `stop` came true while there was none.

        Args:
            past: the entry of the version that it makes, when that was trained before.
            stop: may be asked at any time.

        Raises:
            BatchDiffers: the stream does not give the batch that a ledger says it gave (G4).
        """
        ...

    def assemble(self, batch: Batch) -> TrainBatch:
        """The arrays of the batch that `next` gave."""
        ...

    def train(self, batch: Batch, past: LedgerEntry | None, score: float) -> None:
        """The batch that `next` gave has been trained, with this score of the warm-up."""
        ...

    def rename(self, version: Version) -> None:
        """The newest version is known as `version`: its epoch may be another one than that of the version before."""
        ...


class Cut(NamedTuple):
    """How a version is computed."""

    micro_tokens: int
    """Budget of its micro-batches; 0: the trainer's own."""
    choices: Choices | None
    """None: as the trainer chooses."""


def recorded_cut(entry: LedgerEntry | None) -> Cut:
    """How the version of an entry was computed; without one nothing is recorded."""
    if entry is None:
        return Cut(0, None)
    return Cut(0 if isinstance(entry.micro_tokens, UnsetType) else entry.micro_tokens, recorded_choices(entry))


def recorded_choices(entry: LedgerEntry) -> Choices | None:
    """What a trainer chose for the entry's version; of an earlier build that chose nothing."""
    return Choices() if isinstance(entry.choices, UnsetType) else entry.choices


def log_notice(text: str) -> None:
    """Tell people what they should know where nobody else does."""
    logger.warning("event=notice text=%s", text)


def train_version(
    fold: Folding,
    trainer: Trainer,
    books: Books,
    stop: Callable[[], bool],
    *,
    began: Callable[[Batch], None] | None = None,
    cut: Callable[[LedgerEntry | None], Cut] = recorded_cut,
    say: Callable[[str], None] = log_notice,
) -> Stepped | None:
    """Train the next batch and write it down; None when `stop` came true while waiting for one.

    A failure leaves fold and trainer of no use: both begin again from a checkpoint.

    Args:
        fold: gives the batch.
        trainer: the backend.
        books: where it is written down.
        stop: asked while a batch is awaited.
        began: told of the batch that is there.
        cut: how a version is computed, from the entry of when it was trained before.
        say: told what people should know of how it was computed, one text at a time.

    Raises:
        BatchDiffers: the stream does not give the batch that the books say it gave (G4).
    """
    start_s = time.perf_counter()
    past = books.at(fold.own.version.number + 1)
    batch = fold.next(past, stop)
    if batch is None:
        return None
    if began is not None:
        began(batch)
    before = fold.own
    if past is not None and past.used != used(batch):
        raise batch_differs(
            f"version {past.version} was trained from {describe(past)}, the stream now gives {len(batch.groups)} groups from task "
            f"{batch.groups[0].task}, cursor {before.cursor}",
            past,
            used(batch),
            hint=books.hint,
        )
    tokens, choices = cut(past)
    arrays = replace(fold.assemble(batch), micro_tokens=tokens, choices=choices)
    waited = time.perf_counter() - start_s
    result = trainer.step(arrays)
    for notice in result.notices:
        say(notice)
    metrics = result.metrics | measure(batch, arrays, before) | speed(arrays, result, waited, time.perf_counter() - start_s - waited)
    metrics["train/unlearned_total"] = float(bool(unlearned(result)))
    fold.train(batch, past, 0.0 if result.score is None else result.score)
    stepped = Stepped(
        before=before,
        state=fold.own,
        batch=batch,
        arrays=arrays,
        result=result,
        reward=mean_reward(batch, before),
        metrics=metrics,
        past=past,
        beside=fold.beside,
    )
    fold.rename(books.enter(stepped))
    return replace(stepped, state=fold.own)


def speed(arrays: TrainBatch, result: StepResult, waited_s: float, step_s: float) -> dict[str, float]:
    """Metrics of how fast a batch was trained, and how long it was waited for."""
    found = {"perf/wait_s": waited_s, "perf/step_s": step_s, "train/tokens_per_second": arrays.num_tokens / step_s, **result.times}
    if (learned_s := result.times.get("perf/actor_train_time", 0.0)) > 0:
        found["perf/actor_train_tok_per_s"] = arrays.num_tokens / learned_s
    if result.peak_s is not None:
        found["train/mfu"] = result.peak_s / step_s
    return found


def measure(batch: Batch, arrays: TrainBatch, state: FoldState) -> dict[str, float]:
    """Metrics of a batch that was closed on `state`, before it is trained."""
    parts = ages(batch, state)
    metrics = staleness_metrics(arrays) | {
        "staleness/in_flight": float(np.mean(parts["in_flight"])),
        "staleness/queued": float(np.mean(parts["queued"])),
        "staleness/publish_lag": float(np.mean(parts["publish_lag"])),
        "rollout/dropped": float(state.num_drops),
        "rollout/tokens_trained": float(arrays.loss_mask.sum()),
        "rollout/truncated_ratio": float((arrays.status == STATUS_CODES[Status.TRUNCATED]).mean()),
    }
    if state.reward_count:
        metrics["rollout/raw_reward"] = state.reward_sum / state.reward_count
    greedy = [reward for group in batch.groups if (reward := group.baseline_reward) is not None]
    if greedy:
        metrics["rollout/baseline_reward"] = float(np.mean(greedy))
    for name, values in arrays.reward_parts.items():
        if (known := values[np.isfinite(values)]).size:
            metrics[reward_part(name)] = float(known.mean())
    if arrays.kind == "rl":
        metrics |= _spread(batch, arrays)
    return metrics | _tokens(batch, arrays, state)


def _tokens(batch: Batch, arrays: TrainBatch, state: FoldState) -> dict[str, float]:
    """What became of sampled tokens: all that were stored since the batch before, or waited then, are trained, masked, dropped or wait."""
    of_batch = sum(rollout.length for group in batch.groups for rollout in group.rollouts.values())
    found = {"tokens/stored_total": float(state.stored_tokens), "tokens/waiting": float(state.waiting_tokens - of_batch)}
    if arrays.kind == "rl":
        found["tokens/masked_total"] = float(of_batch - arrays.loss_mask.sum())
    for reason, tally in state.dropped.items():
        name = dropped_tokens(reason)
        found[name] = found.get(name, 0.0) + tally.tokens
    return found


def _spread(batch: Batch, arrays: TrainBatch) -> dict[str, float]:
    """How the parts of the ages are spread over trained tokens and samples."""
    found: dict[str, float] = {}
    for beginning, parts in zip(("", "sample_"), parts_of_ages(batch, arrays), strict=True):
        # np.percentile gives the same at five times the price.
        ordered = np.sort(parts, axis=1)
        last = ordered.shape[1] - 1
        for quantile, rank in (("p50", 0.5 * last), ("p95", 0.95 * last), ("max", last)):
            low = int(rank)
            below, above = ordered[:, low], ordered[:, min(low + 1, last)]
            for part, value in zip(PARTS, (below + (rank - low) * (above - below)).tolist(), strict=True):
                found[staleness_part(beginning, part, quantile)] = value
    return found


def mean_reward(batch: Batch, state: FoldState) -> float | None:
    """Mean reward of the rollouts that arrived since the batch before, dropped ones too; where none did, of those in the batch.

    None: no rollout had one, as demonstrations have none.
    """
    if state.reward_count:
        return state.reward_sum / state.reward_count
    rewards = [rollout.reward for group in batch.groups for _, rollout in sorted(group.compared.items()) if rollout.reward is not None]
    return float(np.mean(rewards)) if rewards else None


def batch_differs(message: str, entry: LedgerEntry, got: Sequence[Used], *, hint: str = "") -> BatchDiffers:
    """The error for a batch `got` that is not the one of a ledger's `entry`; `hint` is added to the usual one."""
    usual = "was the stream, the ledger or the configuration changed by hand?"
    sequences = {sequence for group in entry.used for sequence in group.sequences}
    return BatchDiffers(
        message,
        hint=f"{usual} {hint}".rstrip(),
        version=str(entry.version),
        what=differing_groups(entry.used, got),
        sequences=tuple(sorted(sequences)),
    )


def differing_groups(expected: Sequence[Used], got: Sequence[Used]) -> str:
    """The first groups of two batches that differ, in words."""
    ours = {group.task: group for group in got}
    for group in expected:
        other = ours.get(group.task)
        if other is None:
            return f"task {group.task} was in the batch, the stream does not give it there"
        if other != group:
            return f"task {group.task} was trained from messages {group.sequences}, the stream gives {other.sequences}"
    more = sorted(set(ours) - {group.task for group in expected})
    return f"task {more[0]} was not in the batch, the stream gives it there" if more else "the groups are the same"


def describe(entry: LedgerEntry) -> str:
    """How many groups an entry was trained from, and where the stream was."""
    first = entry.used[0].task if entry.used else None
    return f"{len(entry.used)} groups from task {first}, cursor {entry.cursor}"
