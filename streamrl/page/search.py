"""Which samples of a run are wanted, and what became of those that the ledger names. Plain functions over records."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from streamrl.history.inspect_samples import versions_of
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.samples import Sample, TurnSpan
from streamrl.telemetry.names import counted_as

TRAINED, DROPPED = "trained", "dropped"
BASELINE = "baseline"
"""Of a trained group the greedy rollout, of which nothing is."""
MOST_HITS = 300
"""Samples after which an answer ends, with the message that they are in."""
_AROUND = 80


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model; Unix seconds, 0.0 where not known."""

    asked_s: float
    began_s: float
    finished_s: float
    first_version: str
    """Which sampled its first token."""
    last_version: str
    """Which sampled its last one: weights may change in the middle of it."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A sample in a list."""

    batch: str
    """The version that was made by the batch that it was trained in, or dropped before."""
    became: str
    """`trained`, `baseline`, or why it was dropped."""
    task: int
    rollout: int
    sample: int
    sequence: int
    agent: str = ""
    """Whose own reward it is trained on; empty: it is the rollout's."""
    branch_of: int | None = None
    """The sample of its rollout that it has left."""
    reward: float | None
    """That it is trained on."""
    status: str
    finish_reason: str
    num_tokens: int
    num_trained: int
    first_version: str
    last_version: str
    engine: str
    times: dict[str, float]
    """Unix seconds of what happened to it, as far as is known: claimed, started, finished, scored."""
    turns: tuple[Turn, ...]
    """Those that have times; of a record without turns of its own one that is all of it."""


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that was looked for."""

    line: Line
    text: str
    """What stands around the words that were looked for, or the beginning of the answer."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What several batches have of what is wanted."""

    samples: list[Hit]
    batches: int
    """That were begun."""
    num_samples: int
    """That were looked at in them."""
    missing: int
    """Messages that the stream has no more, or that cannot be read."""
    first: int
    """Number of the oldest version that was looked at; 0: none was."""
    more: int | None
    """Number of the version to go on with; None: there is none."""
    skip: int
    """Messages of its batch that were looked at already."""


_Text = Annotated[str, Meta(max_length=1000)]


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is looked for; a field that is empty takes all."""

    least_reward: float | None = None
    most_reward: float | None = None
    least_tokens: int | None = None
    most_tokens: int | None = None
    became: _Text = ""
    """`trained`, `dropped`, or the reason of a drop."""
    status: _Text = ""
    version: _Text = ""
    """Which sampled its first token."""
    task: int | None = None
    text: _Text = ""
    """In any case, upper or lower."""

    def takes(self, line: Line) -> bool:
        """Whether a sample is wanted, its text and what became of it aside."""
        if (self.least_reward is not None or self.most_reward is not None) and line.reward is None:
            return False
        return (
            (self.least_reward is None or (line.reward is not None and line.reward >= self.least_reward))
            and (self.most_reward is None or (line.reward is not None and line.reward <= self.most_reward))
            and (self.least_tokens is None or line.num_tokens >= self.least_tokens)
            and (self.most_tokens is None or line.num_tokens <= self.most_tokens)
            and self.status in ("", line.status)
            and self.version in ("", line.first_version)
            and self.task in (None, line.task)
        )


class Ends:
    """What became of the rollouts that a ledger entry names.

    Args:
        entry: with its drops in it, where those are wanted.
        task: of this task only.
        became: of these only; see `Wanted`.
    """

    def __init__(self, entry: LedgerEntry, *, task: int | None = None, became: str = "") -> None:
        self._rollouts: dict[tuple[int, int, int], str] = {}
        self._messages: dict[int, str] = {}
        self._became = became
        for group in entry.used if became in ("", TRAINED) else ():
            if task in (None, group.task):
                for rollout, sequence in zip(group.rollouts, group.sequences, strict=True):
                    self._rollouts[group.task, rollout, sequence] = TRAINED
        for drop in entry.drops if became != TRAINED else ():
            reason = counted_as(drop.reason)
            if drop.sequence and task in (None, drop.task) and became in ("", DROPPED, reason):
                for rollout in drop.rollouts:
                    self._rollouts.setdefault((drop.task, rollout, drop.sequence), drop.reason)
                if not drop.rollouts:
                    self._messages[drop.sequence] = drop.reason

    def sequences(self) -> list[int]:
        """Messages that hold them, in the entry's order."""
        return list(dict.fromkeys([*(sequence for _, _, sequence in self._rollouts), *self._messages]))

    def of(self, one: Sample, sequence: int) -> str:
        """`trained`, `baseline`, the reason of its drop, or nothing: it is none of them."""
        found = self._rollouts.get((one.task, one.rollout, sequence)) or self._messages.get(sequence, "")
        if found == TRAINED and not one.loss_mask.any():
            return "" if self._became else BASELINE
        return found


def turns_of(sample: Sample) -> tuple[Turn, ...]:
    """The turns of a sample that have times; where it has recorded none of its own, one that is all of it."""
    whole = TurnSpan(start=0, length=len(sample.tokens), asked_s=sample.started_s, began_s=sample.began_s, finished_s=sample.finished_s)
    by_token = versions_of(sample)
    found: list[Turn] = []
    for turn in sample.turns or (whole,):
        versions = [version for version in by_token[turn.start : turn.start + turn.length] if version is not None] or [""]
        if turn.finished_s:
            first, last = versions[0], versions[-1]
            found.append(
                Turn(asked_s=turn.asked_s, began_s=turn.began_s, finished_s=turn.finished_s, first_version=first, last_version=last)
            )
    return tuple(found)


def around(text: str, words: str) -> str | None:
    """What stands around the first place of some words, in any case; None where they are not there."""
    at = text.casefold().find(words.casefold())
    if at < 0:
        return None
    start, end = max(0, at - _AROUND), at + len(words) + _AROUND
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
