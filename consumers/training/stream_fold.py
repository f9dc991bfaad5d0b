"""The fold of a run's own stream, by its own ledger: what a live trainer and a replay train from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from streamrl.consumers.training.reader import Incoming, RecordReader
from streamrl.consumers.training.sample_blobs import SampleBlobs
from streamrl.consumers.training.steps import batch_differs, describe
from streamrl.core.assembly import assemble
from streamrl.core.batches import TrainBatch
from streamrl.core.fold import Batch, Effects, close, fold, is_warm, trained
from streamrl.core.gaps import bridged
from streamrl.core.state import FoldConfig, FoldState, PendingTask
from streamrl.errors import SchemaError
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.versions import Version

POLL_S = 0.05
"""How often a wait for records looks whether it should stop."""
FORGET_AT = 64
"""Messages held for pending groups are looked through for dropped ones at this many, and then at twice what was left."""


class HeldMessages:
    """The decoded messages of pending groups, by sequence; `messages` is filled and emptied in place. With what they keep beside them."""

    def __init__(self, messages: dict[int, SampleBatch], blobs: SampleBlobs | None = None) -> None:
        self.messages = messages
        self._blobs = blobs
        self._forget_at = FORGET_AT
        for samples in messages.values():
            self._want(samples)

    def __len__(self) -> int:
        return len(self.messages)

    def take(self, incoming: Incoming, state: FoldState, change: Callable[[SampleBatch], SampleBatch] | None = None) -> None:
        """Hold a message that has just been folded, changed if asked for, when a pending group of `state` lies in it."""
        sequence, samples = incoming.record.sequence, incoming.samples
        if samples is not None:
            task = state.pending.get(samples.task)
            if task is not None and any(r.sequence == sequence for r in task.rollouts.values()):
                self.messages[sequence] = samples if change is None else change(samples)
                self._want(samples)
        if len(self.messages) >= self._forget_at:  # groups of several messages may have been dropped, and no batch closes for long
            self.forget(state)

    def forget(self, state: FoldState) -> None:
        """Let go of messages in which no pending group of `state` lies any more."""
        held = {r.sequence for task in state.pending.values() for r in task.rollouts.values()}
        for sequence in [s for s in self.messages if s not in held]:
            del self.messages[sequence]
        self._forget_at = max(FORGET_AT, 2 * len(self.messages))
        if self._blobs is not None:
            self._blobs.keep(self.messages.values())

    def missing(self, batch: Batch, *, again: bool = False) -> list[tuple[PendingTask, int, str]]:
        """Rollouts of a batch that cannot be trained on for want of what they keep beside them, and why; `again`: see `SampleBlobs`."""
        found: list[tuple[PendingTask, int, str]] = []
        if self._blobs is None:
            return found
        for sequence in batch.sequences:
            self._blobs.want(self.messages[sequence], now=True, again=again)
        for group in batch.groups:
            for sequence in {pending.sequence for pending in group.rollouts.values()}:
                problems = self._blobs.problems(self.messages[sequence], again=again)
                found += [(group, k, why) for k, why in problems.items() if k in group.rollouts and group.rollouts[k].sequence == sequence]
        return found

    def assemble(self, batch: Batch, state: FoldState, config: FoldConfig) -> TrainBatch:
        """A batch of what is held; raises SchemaError where a blob of its rollouts cannot be used."""
        for group, rollout, why in self.missing(batch, again=True):
            raise SchemaError(
                f"version {state.version.number + 1} cannot be trained again, rollout {rollout} of task {group.task} lacks {why}",
                hint="its blobs were trimmed with their samples, or lost: go on from a later version",
            )
        return assemble(batch, self.messages, state, config, **({} if self._blobs is None else self._blobs.takes))

    def _want(self, samples: SampleBatch) -> None:
        if self._blobs is not None:
            self._blobs.want(samples)


class StreamFold:
    """Implements `streamrl.consumers.training.steps.Folding`.

    A version that is in the ledger is closed exactly as it was: the same records folded, the same groups. A new one folds every
    record that is already here before it closes, so that the oldest groups are chosen from all there are; the ledger's cursor
    records how far that was.

    Args:
        reader: of the sample stream, from `state.cursor` on.
        config: the decisions.
        state: where to go on from.
        messages: decoded messages by sequence that `state` holds pending.
        gaps: entries of gaps, in the order of their epochs.
        effects: does what a record asks for.
        waiting: called with the state while no record comes.
        blobs: what samples keep beside them; None: nothing is looked at.
        lost: puts onto the stream that a rollout of a group cannot be trained on, and why; False while there is no room. None: nothing new
            is closed here.
    """

    beside: LedgerEntry | None = None

    def __init__(
        self,
        *,
        reader: RecordReader,
        config: FoldConfig,
        state: FoldState,
        messages: dict[int, SampleBatch],
        gaps: Iterable[LedgerEntry] = (),
        effects: Callable[[Effects, Incoming], None] | None = None,
        waiting: Callable[[FoldState], None] | None = None,
        blobs: SampleBlobs | None = None,
        lost: Callable[[PendingTask, int, str], bool] | None = None,
    ) -> None:
        self._reader = reader
        self._config = config
        self._state = state
        self._held = HeldMessages(messages, blobs)
        self._lost = lost
        self._told: set[tuple[int, int]] = set()
        self._gaps = tuple(gaps)
        self._effects = effects
        self._waiting = waiting
        self._pass_gaps()

    @property
    def own(self) -> FoldState:
        """The state as it is now."""
        return self._state

    def next(self, past: LedgerEntry | None, stop: Callable[[], bool]) -> Batch | None:
        """See `Folding.next`. `stop` is asked before each record."""
        while True:
            if past is None and (self._reader.empty or len(self._held) > 8 * self._config.batch_tasks):
                batch = close(self._state, self._config)
                if batch is not None and not self._lacks(batch):
                    return batch
            elif past is not None and self._state.cursor >= past.cursor:
                batch = close(self._state, self._config)
                if batch is None or self._state.cursor > past.cursor:
                    raise batch_differs(
                        f"version {past.version} closed at sequence {past.cursor} with {describe(past)}, the stream gives none there",
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
                self._waiting(self._state)

    def assemble(self, batch: Batch) -> TrainBatch:
        """See `Folding.assemble`."""
        return self._held.assemble(batch, self._state, self._config)

    def train(self, batch: Batch, past: LedgerEntry | None, score: float) -> None:
        """See `Folding.train`."""
        warm = past.warm if past is not None else is_warm(self._state, self._config, score)
        self._state = trained(self._state, batch, self._config, warm=warm, score=score)
        self._held.forget(self._state)

    def rename(self, version: Version) -> None:
        """See `Folding.rename`."""
        self._state = replace(self._state, version=version)
        self._pass_gaps()

    def _pass_gaps(self) -> None:
        for gap in self._gaps:
            self._state = bridged(self._state, gap)

    def _lacks(self, batch: Batch) -> bool:
        """Whether rollouts of a batch cannot be trained on. The stream is told of each, and the batch closes without them behind that."""
        missing = self._held.missing(batch)
        for group, rollout, why in missing:
            if self._lost is not None and (group.task, rollout) not in self._told and self._lost(group, rollout, why):
                self._told.add((group.task, rollout))
        return bool(missing)

    def _take(self, incoming: Incoming) -> None:
        state, effects = fold(self._state, incoming.record, self._config)
        self._state = replace(state, cursor_s=incoming.stored_s)
        self._held.take(incoming, self._state)
        if self._effects is not None:
            self._effects(effects, incoming)
