"""Trains beside a parent's ledger: the part that a branch (of a finished stretch) and a tap (of a live stream) share."""

from __future__ import annotations

import time
from collections.abc import Callable

from streamrl.consumers.training.reader import Incoming, RecordReader
from streamrl.consumers.training.steps import FORGET_AT, POLL_S, Entries, Stepped, batch_differs, measure
from streamrl.core.assembly import assemble, used
from streamrl.core.fold import Batch
from streamrl.core.state import FoldConfig
from streamrl.errors import BatchDiffers
from streamrl.history.branch_state import BranchState, own_batch, own_trained, parent_batch, parent_trained, take, translate
from streamrl.schemas.columns import SampleBatch
from streamrl.schemas.ledger import LedgerEntry
from streamrl.trainers.protocol import Trainer


class BranchStepper:
    """Folds records for parent and branch, closes the branch's batches where its parent closed its own, trains them.

    It never runs ahead of the parent: at each of the parent's ledger entries it may have trained as many groups as the parent has. No clock
    and no arrival time has a part in that, so a crash and a second branch decide alike. With the parent's own fold configuration the
    batches are the parent's, which is checked.

    Args:
        reader: of the sample stream, from `state.cursor` on.
        parent: the parent's ledger.
        trainer: holds the parameters that belong to `state`.
        config: the branch's decisions.
        parent_config: the parent's decisions.
        state: where to go on from.
        messages: decoded and translated messages by sequence that `state.own` holds pending.
    """

    def __init__(
        self,
        *,
        reader: RecordReader,
        parent: Entries,
        trainer: Trainer,
        config: FoldConfig,
        parent_config: FoldConfig,
        state: BranchState,
        messages: dict[int, SampleBatch],
    ) -> None:
        self.state = state
        self.beside: LedgerEntry | None = None
        """The parent's entry at which the newest batch was closed."""
        self._reader = reader
        self._parent = parent
        self._trainer = trainer
        self._config = config
        self._parent_config = parent_config
        self._same = config == parent_config
        self._messages = messages
        self._forget_at = FORGET_AT

    def next(self, wait: Callable[[], bool]) -> Stepped | None:
        """Train the branch's next batch.

        Args:
            wait: called when the parent has no further entry, and while a record is awaited: returns whether to look again.

        Returns:
            None when `wait` said no.

        Raises:
            BatchDiffers: the stream does not give a batch that the parent's ledger says it gave.
        """
        began = time.perf_counter()
        while True:
            entry = self._parent.at(self.state.parent.version.number + 1)
            if entry is None:
                if not wait():
                    return None
                continue
            while self.state.parent.cursor < entry.cursor:
                incoming = self._reader.get(POLL_S)
                if incoming is not None:
                    self._take(incoming)
                elif not wait():
                    return None
            theirs = parent_batch(self.state, entry, self._parent_config)
            if theirs is None or used(theirs) != entry.used:
                raise self._wrong(entry, theirs)
            batch = own_batch(self.state, self._config, len(theirs.groups))
            if batch is not None:
                return self._train(batch, entry, time.perf_counter() - began)
            self.state = parent_trained(self.state, theirs, entry, self._parent_config)
            self._forget()

    def _train(self, batch: Batch, entry: LedgerEntry, waited: float) -> Stepped:
        before, self.beside = self.state.own, entry
        if self._same and used(batch) != entry.used:
            raise self._wrong(entry, batch)
        arrays = assemble(batch, self._messages, before, self._config)
        began = time.perf_counter()
        result = self._trainer.step(arrays)
        metrics = dict(result.metrics) | measure(batch, arrays, before)
        metrics |= {"perf/wait_s": waited, "perf/step_s": time.perf_counter() - began}
        self.state = own_trained(self.state, batch, self._config)
        self._forget()
        return Stepped(before, self.state.own, batch, arrays, result, None, metrics)

    def _take(self, incoming: Incoming) -> None:
        sequence = incoming.record.sequence
        numbers = self.state.numbers
        self.state = take(self.state, incoming.record, self._config, self._parent_config)
        if incoming.samples is not None:
            task = self.state.own.pending.get(incoming.samples.task)
            if task is not None and any(r.sequence == sequence for r in task.rollouts.values()):
                self._messages[sequence] = translate(incoming.samples, numbers)
        if len(self._messages) >= self._forget_at:
            self._forget()

    def _forget(self) -> None:
        held = {r.sequence for task in self.state.own.pending.values() for r in task.rollouts.values()}
        for sequence in [s for s in self._messages if s not in held]:
            del self._messages[sequence]
        self._forget_at = max(FORGET_AT, 2 * len(self._messages))

    def _wrong(self, entry: LedgerEntry, batch: Batch | None) -> BatchDiffers:
        got = used(batch) if batch is not None else ()
        return batch_differs(
            f"the parent's version {entry.version} was trained from {len(entry.used)} groups, cursor {entry.cursor}; the stream gives "
            f"{len(got)} others there",
            entry,
            got,
            hint="`streamrl replay RUN --verify` tells more",
        )
