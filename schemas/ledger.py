"""The ledger: one entry per trained batch; with the sample stream it determines the whole run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec
from msgspec.structs import force_setattr

from streamrl.schemas.versions import Version

FORMER_REASONS = {"zero_spread": "zero_variance"}
"""Words of earlier versions, which their entries hold and which are read as what they mean now; of metrics too."""
FORMER_METRICS = {"rollout/zero_spread": "rollout/zero_variance"}


NO_MESSAGE = 0
"""A sequence that no message has."""
REASON_LENGTH = 400
"""A reason of a drop is cut here: it may quote what it complains of."""


FILTER = "filter"
"""What a reason begins with that a filter of the user's has given."""
_FILTER_LENGTH = 60


def filter_reason(said: str) -> str:
    """The reason of a drop for what a filter said: `filter`, or `filter: ` and its words, without what cannot be printed, and cut."""
    said = said.removeprefix(f"{FILTER}: ") if said != FILTER else ""
    printable = "".join(one if one.isprintable() else " " for one in said[: 4 * _FILTER_LENGTH])
    words = " ".join(printable.split())[:_FILTER_LENGTH].rstrip()
    return f"{FILTER}: {words}" if words else FILTER


class Drop(msgspec.Struct, frozen=True):
    """Something on the sample stream that is never trained, and why.

    One record names the rollouts of one message; no rollouts means the message as a whole. Reasons: `stale`, `duplicate`, `late` (its task
    had ended), `failed`, `filtered`, `timeout`, `deliveries`, `poison`, `zero_variance`, `empty` (not one token of the group is trained),
    `no_baseline` (the group has no greedy answer to be compared with), `lost_version` (a token is of a version that was made and lost, see
    `Gap`), `inexact` (versions of its tokens are guesses), `truncated` (a length limit ended it), `unrewarded` (its rewards did not come in
    time), `expired` (its task was issued too many versions ago), `lost` (nobody held its task any more), `blob_missing` (what its samples
    name is gone), `row_too_long` and `row_broken` (of the data: there was nothing to roll out), `superseded_reward` (a reward that came
    after its task had ended, or is no newer than the one that is there), and those of the section filters: `too_short`, `too_long` and
    `repetitive` (its answer), `too_hard` and `too_easy` (the mean reward of its group), `filter` (a function of the user's, which may give
    a reason, see filter_reason).
    """

    sequence: int
    """Of the message; `NO_MESSAGE` for a task that expired."""
    task: int
    rollouts: tuple[int, ...]
    reason: str
    detail: str = ""
    retires: bool = False
    """True on the one record that ends its task without training it."""

    def __post_init__(self) -> None:
        if self.reason in FORMER_REASONS:
            force_setattr(self, "reason", FORMER_REASONS[self.reason])


def count_drops(drops: Iterable[Drop]) -> Counter[str]:
    """Rollouts by reason; a message as a whole counts as one."""
    counts = Counter[str]()
    for drop in drops:
        counts[drop.reason] += max(1, len(drop.rollouts))
    return counts


class SpilledDrops(msgspec.Struct, frozen=True, kw_only=True):
    """Where the drops of an entry are that would not fit the message: a zlib stream of the MessagePack array of them."""

    blob: str
    """Name among the run's blobs."""
    sha256: str
    """Of the blob, hex."""
    number: int
    """Drops in it."""
    reasons: dict[str, int]
    """What `count_drops` gives of them, for those who only count."""

    def __post_init__(self) -> None:
        if FORMER_REASONS.keys() & self.reasons.keys():
            force_setattr(self, "reasons", {FORMER_REASONS.get(reason, reason): count for reason, count in self.reasons.items()})


class Used(msgspec.Struct, frozen=True):
    """One group of a batch: its task, and for each of its rollouts in order the sequence of the message it lies in."""

    task: int
    rollouts: tuple[int, ...]
    sequences: tuple[int, ...]


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that were made and cannot be made again: their entries are lost, or what they were made of.

    The entry that has one trains nothing. Its version is that of the epoch that begins with it, with the number that is gone on from;
    entries before it with higher numbers count no more.
    """

    lost: str
    """`end`, `middle` or `all` of the ledger; `samples`: the end of the sample stream."""
    missing: tuple[tuple[int, int], ...]
    """First and last of the version numbers in a row that have no entry."""
    highest: Version
    """The highest version that is known to have been made."""
    known_by: str
    """Whence that is known: `ledger`, `checkpoint` or `manifest`."""
    first: int | msgspec.UnsetType = msgspec.UNSET
    """Number of the epoch's first version, the one that is gone on from: it is published again under that name, so that engines which serve
    a lost one have a later one to take. Not on the wire when unset: earlier builds began the epoch with the version after it."""

    def first_after(self, version: Version) -> int:
        """Number of the epoch's first version, where `version` is that of the gap's entry."""
        return version.number + 1 if isinstance(self.first, msgspec.UnsetType) else self.first


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """How a version was computed, as far as the run chose that itself, from the device and its memory."""

    attention: str = "sdpa"
    """What `trainer.attention` says, `auto` resolved."""
    compiled: bool = False
    """Whether layers and head were compiled."""
    kept_layers: int | None = None
    """Layers that kept their activations; None: all. No digit depends on it."""
    row_length: int = 0
    """Of packed rows; 0: rows were not packed. It follows from the budget, the batch and the trainer's memory, and digits depend on it."""


class TrainedOn(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that a version was trained on, as keys of the section `trainer`: sums over others have other last bits."""

    ranks: int = 1
    shards: int = 1
    gather: str = "auto"
    """Of a model that is cut."""
    backend: str | msgspec.UnsetType = msgspec.UNSET
    """Where it is not what the run's other keys said before there were several: `torch`, or `table`."""
    tensor: int | msgspec.UnsetType = msgspec.UNSET
    """Parts of each matrix."""
    experts: int | msgspec.UnsetType = msgspec.UNSET
    """Parts of a mixture's experts; unset: 1."""
    pipeline: int | msgspec.UnsetType = msgspec.UNSET
    """Stages of layers; unset: 1."""
    context: int | msgspec.UnsetType = msgspec.UNSET
    """Ranks that shared each packed row; unset: 1."""


class SourceTally(msgspec.Struct, frozen=True):
    """What a version was trained on of one source of rows."""

    groups: int
    reward: float | None = None
    """Mean over the groups' rollouts that have one."""


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What made one version out of the one before. Immutable; its message id is `version.number` within its trainer."""

    run: str
    trainer: str
    policy: str = "policy"
    version: Version
    """The version this batch made; trained from number - 1."""
    source: str
    """Source of all its groups."""
    used: tuple[Used, ...]
    """Groups in the order they were packed: by task, then rollout, then sample."""
    drops: tuple[Drop, ...] = ()
    """Everything that was decided against since the previous entry, in stream order."""
    cursor: int
    """Sequence of the last record folded before the batch closed."""
    granted: int
    retired: int
    """Tasks ended (trained or dropped) with this entry."""
    seed: int = 0
    fingerprint: str = ""
    """Digest of the numerics fingerprint under which `digest` was computed."""
    digest: str = ""
    """Digest of the parameters after the step, 16 hex digits."""
    warm: bool = False
    """Whether the warm-up has ended with or before this entry."""
    staleness: tuple[int, ...] = ()
    """Oldest token's age in versions for each group of `used`."""
    num_samples: int = 0
    num_tokens: int = 0
    metrics: dict[str, float] = {}
    fence: int = 0
    """Fencing token of the trainer that wrote it."""
    time_s: float = 0.0
    """Unix seconds; for people only."""
    spilled: SpilledDrops | msgspec.UnsetType = msgspec.UNSET
    """Set when the drops are in a blob; `drops` is empty then. Not on the wire when unset."""
    score: float | msgspec.UnsetType = msgspec.UNSET
    """What the warm-up decides by: the mean probability of whole answers. Read it with `decided_by`; not on the wire when unset."""
    reward: float | msgspec.UnsetType = msgspec.UNSET
    """Mean reward of the rollouts that arrived for the batch, dropped ones too, which `run.until_reward` looks at. Read it with
    `decided_by`; not on the wire when unset."""
    cursor_s: float | msgspec.UnsetType = msgspec.UNSET
    """Unix seconds at which the bus stored the record at `cursor`, which tells it from another that has its sequence after a loss. Not on
    the wire when unset."""
    histograms: dict[str, tuple[int, ...]] | msgspec.UnsetType = msgspec.UNSET
    """Lengths of the answers that were trained and of those that were dropped, by name (`streamrl.core.lengths`); for people and metrics
    only. Not on the wire when unset, as in entries of earlier builds."""
    reference: str | msgspec.UnsetType = msgspec.UNSET
    """Digest of the reference's parameters at this batch, where the reference is renewed. Not on the wire when unset."""
    micro_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Budget that the batch was cut into micro-batches by, which the digits depend on: whoever trains it again uses the same. Not on the
    wire when unset."""
    choices: Choices | msgspec.UnsetType = msgspec.UNSET
    """How it was computed: whoever trains it again does it likewise. Not on the wire when unset, which says what the defaults of
    `Choices` do."""
    trained_on: TrainedOn | msgspec.UnsetType = msgspec.UNSET
    """Whoever trains it again does so on these. Not on the wire when unset, as in entries of earlier builds and of gaps."""
    sources: dict[str, SourceTally] | msgspec.UnsetType = msgspec.UNSET
    """By `metadata.data_source` of the tasks, for people only; the 64 most frequent. Not on the wire when unset: no task has one."""
    gap: Gap | msgspec.UnsetType = msgspec.UNSET
    """Set on an entry that says what was lost, and has no batch; see `take_entry`. Not on the wire when unset."""

    def __post_init__(self) -> None:
        if FORMER_METRICS.keys() & self.metrics.keys():
            force_setattr(self, "metrics", {FORMER_METRICS.get(name, name): value for name, value in self.metrics.items()})

    @property
    def dropped(self) -> Counter[str]:
        """What `count_drops` gives of its drops, wherever they are."""
        return count_drops(self.drops) if isinstance(self.spilled, msgspec.UnsetType) else Counter(self.spilled.reasons)


def take_entry(entries: dict[int, LedgerEntry], gaps: dict[int, LedgerEntry], entry: LedgerEntry) -> None:
    """Take the next entry of a trainer's ledger into its line of versions.

    Args:
        entries: by version number, of the newest epoch; changed in place.
        gaps: entries of gaps by the epoch that begins with them; changed in place.
        entry: in stream order.
    """
    number = entry.version.number
    if entry.gap is not msgspec.UNSET:
        for void in [other for other in entries if other > number]:
            del entries[void]
        gaps[entry.version.epoch] = entry
    elif number not in entries or entries[number].version.epoch <= entry.version.epoch:
        entries[number] = entry


def standing(gaps: Mapping[int, LedgerEntry]) -> dict[int, LedgerEntry]:
    """The gaps on the line of versions: one that a trainer later went back behind, to a lower number, has no part in it."""
    lowest, found = math.inf, dict[int, LedgerEntry]()
    for epoch, gap in sorted(gaps.items(), reverse=True):
        if gap.version.number <= lowest:
            found[epoch], lowest = gap, gap.version.number
    return dict(sorted(found.items()))


def ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """First and last of each row of numbers without a hole."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


class Decisive(msgspec.Struct, frozen=True):
    """The numbers of a batch that the stream decides by."""

    score: float
    """0.0 for a batch that is not of the warm-up."""
    reward: float | None
    """None: no rollout had one."""


class _Line(Protocol):
    """A `LedgerEntry`, or what a reader has decoded of one."""

    @property
    def score(self) -> float | msgspec.UnsetType: ...
    @property
    def reward(self) -> float | msgspec.UnsetType: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


def decided_by(entry: _Line) -> Decisive:
    """What was decided by at an entry. Earlier builds wrote neither field: theirs are among the metrics."""
    score, reward = entry.score, entry.reward
    return Decisive(
        entry.metrics.get("train/answer_probability", 0.0) if isinstance(score, msgspec.UnsetType) else score,
        entry.metrics.get("rollout/raw_reward") if isinstance(reward, msgspec.UnsetType) else reward,
    )
