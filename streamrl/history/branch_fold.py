"""The folds of a branch and of its parent: what a branch (of a finished stretch) and a tap (of a live stream) train from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from streamrl.config.tree import Config
from streamrl.consumers.training.reader import Incoming, RecordReader
from streamrl.consumers.training.sample_blobs import SampleBlobs
from streamrl.consumers.training.steps import Cut, Entries, batch_differs, recorded_cut
from streamrl.consumers.training.stream_fold import POLL_S, HeldMessages
from streamrl.core.assembly import used
from streamrl.core.batches import TrainBatch
from streamrl.core.fold import Batch
from streamrl.core.state import FoldConfig, FoldState
from streamrl.errors import BatchDiffers
from streamrl.history.branch_state import BranchState, own_batch, own_trained, parent_batch, parent_trained, past_gaps, take, translate
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.versions import Version


class BranchFold:
    """Folds records for parent and branch, closes the branch's batches where its parent closed its own.

    It never runs ahead of the parent: at each of the parent's ledger entries it may have trained as many groups as the parent has. No clock
    and no arrival time has a part in that, so a crash and a second branch decide alike. With the parent's own fold configuration the
    batches are the parent's, which is checked. Implements `streamrl.consumers.training.steps.Folding`.

    Args:
        reader: of the sample stream, from `state.cursor` on.
        parent: the parent's ledger.
        config: the branch's decisions.
        parent_config: the parent's decisions.
        state: where to go on from.
        messages: decoded and translated messages by sequence that `state.own` holds pending.
        gaps: entries of the parent's gaps, in the order of their epochs; asked for before each of its entries.
        waiting: called with the state while nothing comes.
        blobs: what samples keep beside them; None: nothing is looked at.
    """

    def __init__(
        self,
        *,
        reader: RecordReader,
        parent: Entries,
        config: FoldConfig,
        parent_config: FoldConfig,
        state: BranchState,
        messages: dict[int, SampleBatch],
        gaps: Callable[[], Iterable[LedgerEntry]] = tuple,
        waiting: Callable[[BranchState], None] | None = None,
        blobs: SampleBlobs | None = None,
    ) -> None:
        self._reader = reader
        self._parent = parent
        self._config = config
        self._parent_config = parent_config
        self._same = config == parent_config
        self._state = state
        self._held = HeldMessages(messages, blobs)
        self._gaps = gaps
        self._waiting = waiting
        self._beside: LedgerEntry | None = None

    @property
    def state(self) -> BranchState:
        """Branch and parent as they are now."""
        return self._state

    @property
    def own(self) -> FoldState:
        """The branch's own state as it is now."""
        return self._state.own

    @property
    def beside(self) -> LedgerEntry | None:
        """The parent's entry at which the newest batch was closed."""
        return self._beside

    def next(self, past: LedgerEntry | None, stop: Callable[[], bool]) -> Batch | None:
        """See `Folding.next`. `stop` is asked only when the parent has no further entry, and while a record is awaited."""
        while True:
            entry = self._parent.at(self._state.parent.version.number + 1)
            self._state = past_gaps(self._state, self._gaps())
            if entry is None:
                if self._stops(stop):
                    return None
                time.sleep(POLL_S)
                continue
            while self._state.parent.cursor < entry.cursor:
                incoming = self._reader.get(POLL_S)
                if incoming is not None:
                    self._take(incoming)
                elif self._stops(stop):
                    return None
            theirs = parent_batch(self._state, entry, self._parent_config)
            if theirs is None or used(theirs) != entry.used:
                raise _wrong(entry, theirs)
            batch = own_batch(self._state, self._config, len(theirs.groups))
            if batch is not None:
                if self._same and used(batch) != entry.used:
                    raise _wrong(entry, batch)
                self._beside = entry
                return batch
            self._state = parent_trained(self._state, theirs, entry, self._parent_config)
            self._held.forget(self.own)

    def assemble(self, batch: Batch) -> TrainBatch:
        """See `Folding.assemble`."""
        return self._held.assemble(batch, self.own, self._config)

    def train(self, batch: Batch, past: LedgerEntry | None, score: float) -> None:
        """See `Folding.train`; the parent's scores have ended the warm-up, or will."""
        self._state = own_trained(self._state, batch, self._config)
        self._held.forget(self.own)

    def rename(self, version: Version) -> None:
        """See `Folding.rename`."""
        self._state = replace(self._state, own=replace(self.own, version=version))

    def _stops(self, stop: Callable[[], bool]) -> bool:
        if self._waiting is not None:
            self._waiting(self._state)
        return stop()

    def _take(self, incoming: Incoming) -> None:
        numbers = self._state.numbers
        state = take(self._state, incoming.record, self._config, self._parent_config)
        own, parent = (replace(one, cursor_s=incoming.stored_s) for one in (state.own, state.parent))
        self._state = replace(state, own=own, parent=parent)
        self._held.take(incoming, self.own, lambda samples: translate(samples, numbers))


def parents_cut(fold: BranchFold, config: Config, parent: Config) -> Callable[[LedgerEntry | None], Cut]:
    """See `train_version`: where `trainer.micro_tokens` is its parent's, a new version is cut as the parent's was, for equal digits."""
    same = config.trainer.micro_tokens == parent.trainer.micro_tokens
    return lambda past: recorded_cut(past if past is not None else fold.beside if same else None)


def _wrong(entry: LedgerEntry, batch: Batch | None) -> BatchDiffers:
    got = used(batch) if batch is not None else ()
    return batch_differs(
        f"the parent's version {entry.version} was trained from {len(entry.used)} groups, cursor {entry.cursor}; the stream gives "
        f"{len(got)} others there",
        entry,
        got,
        hint="`streamrl replay RUN --verify` tells more",
    )
