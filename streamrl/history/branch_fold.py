"""The folds of a branch and of its parent: what a branch (of a finished stretch) and a tap (of a live stream) remember and train from.

The stream was sampled by the parent's versions. A branch that closes other batches makes its versions at other places, so a token's version
is translated: the parent's version n becomes the branch's number at the moment when the parent made n. With unchanged batches that is n.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping

import msgspec
import numpy as np
from msgspec.structs import replace

from streamrl.config.tree import Config
from streamrl.consumers.training.reader import Incoming, RecordReader
from streamrl.consumers.training.sample_blobs import SampleBlobs
from streamrl.consumers.training.steps import Cut, Entries, batch_differs, recorded_cut
from streamrl.consumers.training.stream_fold import POLL_S, HeldMessages
from streamrl.core.assembly import used
from streamrl.core.batches import TrainBatch
from streamrl.core.fold import LOST_VERSION, Batch, close, fold, trained
from streamrl.core.gaps import bridged
from streamrl.core.records import Ended, Poison, Record, Rewarded, Rollouts, RolloutView
from streamrl.core.state import FoldConfig, FoldState, initial_state
from streamrl.errors import BatchDiffers, ConfigError, SchemaError
from streamrl.schemas.ledger import LedgerEntry, decided_by, standing
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.versions import Version


class BranchState(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable, like the fold's state; it is the extra part of a tap's checkpoint."""

    own: FoldState
    parent: FoldState
    """Folded by the parent's configuration and advanced by the parent's ledger."""
    numbers: tuple[int, ...]
    """Own version number for each of the parent's, from 0 to `parent.version.number`; never falls."""
    spare: int = 0
    """Groups that the parent has trained and the branch has not: it trains at its parent's pace."""

    @property
    def version(self) -> Version:
        """Own version."""
        return self.own.version

    @property
    def cursor(self) -> int:
        """Sequence of the last folded record."""
        return self.parent.cursor

    @property
    def oldest_needed(self) -> int:
        """Lowest sequence that is read again when going on from here."""
        return self.own.oldest_needed

    def encode(self) -> bytes:
        """To MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> BranchState:
        """From MessagePack; raises SchemaError."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise SchemaError(f"expected the state of a tap in the checkpoint, got {len(data)} bytes that are none: {error}") from error


def begin(config: FoldConfig, parent_config: FoldConfig, parent: FoldState | None = None) -> BranchState:
    """The state before the first record, or at a checkpoint of the parent, whose version numbers the branch then continues."""
    state = parent or initial_state(parent_config)
    own = state if parent or config == parent_config else replace(initial_state(config), granted=state.granted, grants=state.grants)
    return BranchState(own=own, parent=state, numbers=tuple(range(state.version.number + 1)))


def past_gaps(state: BranchState, gaps: Iterable[LedgerEntry]) -> BranchState:
    """The state with the gaps at which it stands behind it, as the parent's own fold has them (`streamrl.core.gaps.bridged`)."""
    for gap in gaps:
        parent = bridged(state.parent, gap)
        if parent is not state.parent:
            state = follow(replace(state, parent=parent))
    return state


def check_gaps(state: BranchState, entries: Container[int], gaps: Mapping[int, LedgerEntry], *, through: int | None, hint: str) -> None:
    """Raise ConfigError where the way of somebody who goes on from a state leads to a gap whose beginning is lost.

    A gap is passed where every entry up to the version that was gone on from is there. Where some of these are lost, nobody knows what
    that version was made of.

    Args:
        state: where somebody goes on from.
        entries: numbers of the versions whose entries are there.
        gaps: the parent's, by the epoch that begins with them.
        through: the parent's version number that is the last one wanted; None: all.
        hint: what to do where a gap is in the way.
    """
    number = state.parent.version.number
    for epoch, gap in standing(gaps).items():
        if state.parent.epochs[-1].epoch >= epoch or (through is not None and number <= through <= gap.version.number):
            continue
        if any(lost not in entries for lost in range(number + 1, gap.version.number + 1)) or gap.version.number < number:
            raise gap_in_the_way(gap, state.parent.version, hint)


def gap_in_the_way(gap: LedgerEntry, version: Version, hint: str) -> ConfigError:
    """The error for a gap that lies between `version` and what is wanted."""
    lost = "" if isinstance(gap.gap, msgspec.UnsetType) else f", after versions up to {gap.gap.highest} were lost ({gap.gap.lost})"
    return ConfigError(
        f"the run went on from version {gap.version}{lost}: from version {version} nothing leads across that gap",
        hint=hint,
        gap=str(gap.version),
    )


def take(state: BranchState, record: Record, config: FoldConfig, parent_config: FoldConfig) -> BranchState:
    """Fold one record into both. What the parent judged impossible is so for the branch: it alone knows which versions there were."""
    parent, effects = fold(state.parent, record, parent_config)
    reason = next((letter.reason for letter in effects.dead if letter.sequence == record.sequence), None)
    mine: Record = record
    if reason is not None and not isinstance(record, Poison):
        # A reward that cannot be ends no task, in the parent neither.
        mine = Poison(record.sequence, None if isinstance(record, Rewarded) else getattr(record, "task", None), reason)
    elif isinstance(record, Rollouts) and max(view.highest for view in record.rollouts) > state.parent.version.number:
        # Of a version that was lost, see `streamrl.core.gaps`: no number of the branch's stands for it.
        mine = Ended(record.sequence, record.source, record.task, None, record.group_size, LOST_VERSION)
    elif isinstance(record, Rollouts):
        mine = replace(record, rollouts=tuple(_translated(view, state.numbers) for view in record.rollouts))
    own, _ = fold(state.own, mine, config)
    own = replace(own, granted=state.own.granted, grants=state.own.grants)
    return follow(replace(state, own=own, parent=parent))


def parent_batch(state: BranchState, entry: LedgerEntry, parent_config: FoldConfig) -> Batch | None:
    """The batch that made the parent's next version, once the cursor is where its ledger entry says."""
    return close(state.parent, parent_config) if state.parent.cursor == entry.cursor else None


def own_batch(state: BranchState, config: FoldConfig, coming: int) -> Batch | None:
    """The branch's batch when its parent closes one of `coming` groups, unless it has trained as many groups as its parent already."""
    batch = close(state.own, config)
    return batch if batch is not None and len(batch.groups) <= state.spare + coming else None


def own_trained(state: BranchState, batch: Batch, config: FoldConfig) -> BranchState:
    """After the branch's step on `batch`. Its warm-up ends with its parent's: whose demonstrations are on the stream."""
    before = state.own
    own = trained(before, batch, config, warm=False)
    own = replace(own, granted=before.granted, grants=before.grants)
    return replace(state, own=own, spare=state.spare - len(batch.groups))


def parent_trained(state: BranchState, batch: Batch, entry: LedgerEntry, parent_config: FoldConfig) -> BranchState:
    """The parent makes its next version; the branch's number at this moment stands for it."""
    after = trained(state.parent, batch, parent_config, warm=entry.warm, score=decided_by(entry).score)
    parent = replace(after, version=entry.version)
    numbers = (*state.numbers, state.own.version.number)
    return follow(replace(state, parent=parent, numbers=numbers, spare=state.spare + len(batch.groups)))


def follow(state: BranchState) -> BranchState:
    """Give the branch its parent's grants, dated by its own version, and the end of its parent's warm-up: both shaped the stream."""
    own, parent = state.own, state.parent
    if parent.granted > own.granted:
        kept = tuple(g for g in own.grants if g[0] > own.watermark and g[1] != own.version.number)
        own = replace(own, granted=parent.granted, grants=(*kept, (parent.granted, own.version.number)))
    if own.warmup_end != parent.warmup_end:
        own = replace(own, warmup_end=parent.warmup_end)
    return state if own is state.own else replace(state, own=own)


def translate(samples: SampleBatch, numbers: tuple[int, ...]) -> SampleBatch:
    """The same samples with the branch's version numbers; `samples` itself is changed and returned."""
    table = np.array(numbers, samples.span_number.dtype)
    sampled = samples.span_number >= 0
    samples.span_number = np.where(sampled, table[np.where(sampled, samples.span_number, 0)], samples.span_number)
    return samples


def _translated(view: RolloutView, numbers: tuple[int, ...]) -> RolloutView:
    def own(number: int) -> int:
        return numbers[number] if number >= 0 else number

    # The parent has judged its epochs; the branch has only its own.
    shares = tuple(replace(share, oldest=own(share.oldest), newest=own(share.newest)) for share in view.shares)
    return replace(view, oldest=own(view.oldest), newest=own(view.newest), highest=own(view.highest), epochs=(), shares=shares)


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
