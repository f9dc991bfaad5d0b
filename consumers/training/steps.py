"""From the stream to one trained batch: the part of the loop that a live trainer and a replay share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from streamrl.algorithms.batch_metrics import staleness_metrics
from streamrl.consumers.training.reader import Incoming, RecordReader
from streamrl.core.assembly import ages, assemble, used
from streamrl.core.batches import TrainBatch
from streamrl.core.fold import Batch, Effects, close, fold, is_warm, trained
from streamrl.core.state import FoldConfig, FoldState
from streamrl.errors import BatchDiffers
from streamrl.schemas.columns import SampleBatch
from streamrl.schemas.ledger import LedgerEntry, Used
from streamrl.trainers.protocol import StepResult, Trainer

POLL_S = 0.05
"""How often a wait for records looks whether it should stop."""
FORGET_AT = 64
"""Messages held for pending groups are looked through for dropped ones at this many, and then at twice what was left."""


class Stepped(msgspec.Struct, frozen=True):
    """One trained batch. `past` is the ledger's entry for the same version when it had been trained before."""

    before: FoldState
    state: FoldState
    batch: Batch
    arrays: TrainBatch
    result: StepResult
    past: LedgerEntry | None
    metrics: dict[str, float]


class Entries(Protocol):
    """What has been trained before."""

    def at(self, number: int) -> LedgerEntry | None:
        """The entry that made version `number`, if there is one."""
        ...


class Stepper:
    """Folds records, closes batches, trains them.

    A version that is in the ledger is trained again exactly as it was: the same records folded, the same groups. A new one folds every
    record that is already here before it closes, so that the oldest groups are chosen from all there are; the ledger's cursor
    records how far that was.
    """

    def __init__(
        self,
        *,
        reader: RecordReader,
        ledger: Entries,
        trainer: Trainer,
        config: FoldConfig,
        state: FoldState,
        messages: dict[int, SampleBatch],
        effects: Callable[[Effects, Incoming], None],
        waiting: Callable[[FoldState], None] | None = None,
    ) -> None:
        self.state = state
        self._reader = reader
        self._ledger = ledger
        self._trainer = trainer
        self._config = config
        self._messages = messages
        self._forget_at = FORGET_AT
        self._effects = effects
        self._waiting = waiting

    def next(self, stop: Callable[[], bool]) -> Stepped | None:
        """Train the next batch; None when `stop` came true while waiting for one.

        Raises:
            BatchDiffers: the stream does not give the batch that the ledger says it gave (G4).
        """
        began = time.perf_counter()
        past = self._ledger.at(self.state.version.number + 1)
        batch = self._collect(past, stop)
        if batch is None:
            return None
        if past is not None and past.used != used(batch):
            raise batch_differs(
                f"version {past.version} was trained from {_describe(past)}, the stream now gives {len(batch.groups)} groups from task "
                f"{batch.groups[0].task}, cursor {self.state.cursor}",
                past,
                used(batch),
            )
        arrays = assemble(batch, self._messages, self.state, self._config)
        waited = time.perf_counter() - began
        result = self._trainer.step(arrays)
        metrics = dict(result.metrics) | measure(batch, arrays, self.state)
        metrics |= {"perf/wait_s": waited, "perf/step_s": time.perf_counter() - began - waited}
        before = self.state
        score = result.metrics.get("train/answer_probability", 0.0)
        warm = past.warm if past is not None else is_warm(before, self._config, score)
        self.state = trained(before, batch, self._config, warm=warm, score=score)
        self._forget()
        return Stepped(before, self.state, batch, arrays, result, past, metrics)

    def _collect(self, past: LedgerEntry | None, stop: Callable[[], bool]) -> Batch | None:
        while True:
            if past is None and (self._reader.empty or len(self._messages) > 8 * self._config.batch_tasks):
                batch = close(self.state, self._config)
                if batch is not None:
                    return batch
            elif past is not None and self.state.cursor >= past.cursor:
                batch = close(self.state, self._config)
                if batch is None or self.state.cursor > past.cursor:
                    raise batch_differs(
                        f"version {past.version} closed at sequence {past.cursor} with {_describe(past)}, the stream gives none there",
                        past,
                        (),
                    )
                return batch
            if stop():
                return None
            incoming = self._reader.get(POLL_S)
            if incoming is not None:
                self._take(incoming)
            elif self._waiting is not None:
                self._waiting(self.state)

    def _take(self, incoming: Incoming) -> None:
        sequence = incoming.record.sequence
        self.state, effects = fold(self.state, incoming.record, self._config)
        if incoming.samples is not None:
            task = self.state.pending.get(incoming.samples.task)
            if task is not None and any(r.sequence == sequence for r in task.rollouts.values()):
                self._messages[sequence] = incoming.samples
        if len(self._messages) >= self._forget_at:  # groups of several messages may have been dropped, and no batch closes for long
            self._forget()
        self._effects(effects, incoming)

    def _forget(self) -> None:
        held = {r.sequence for task in self.state.pending.values() for r in task.rollouts.values()}
        for sequence in [s for s in self._messages if s not in held]:
            del self._messages[sequence]
        self._forget_at = max(FORGET_AT, 2 * len(self._messages))


def measure(batch: Batch, arrays: TrainBatch, state: FoldState) -> dict[str, float]:
    """Metrics of a batch that was closed on `state`, before it is trained."""
    parts = ages(batch, state)
    metrics = staleness_metrics(arrays) | {
        "staleness/in_flight": float(np.mean(parts["in_flight"])),
        "staleness/queued": float(np.mean(parts["queued"])),
        "staleness/publish_lag": float(np.mean(parts["publish_lag"])),
        "rollout/dropped": float(state.num_drops),
        "rollout/tokens_trained": float(arrays.loss_mask.sum()),
    }
    if state.reward_count:
        metrics["rollout/raw_reward"] = state.reward_sum / state.reward_count
    return metrics


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


def _describe(entry: LedgerEntry) -> str:
    first = entry.used[0].task if entry.used else None
    return f"{len(entry.used)} groups from task {first}, cursor {entry.cursor}"
