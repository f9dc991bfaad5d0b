"""What the fold reads: each message of the sample stream, judged and reduced to what decisions need.

`judge` turns one stored message into one record. It is a pure function of the message and never raises: what cannot be read becomes
a `Poison` record, which still retires its task when the headers name one.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np

from streamrl.errors import SchemaError
from streamrl.schemas.codec import decode
from streamrl.schemas.columns import SampleBatch, decode_samples
from streamrl.schemas.samples import Mark, RewardUpdate, Tombstone
from streamrl.schemas.subjects import kind_of


class RolloutView(msgspec.Struct, frozen=True):
    """One rollout of a message, as far as decisions go."""

    rollout: int
    num_samples: int
    num_tokens: int
    oldest: int
    """Lowest version number among its trained tokens; -1 when no model sampled any (demonstrations)."""
    newest: int
    """Highest version number among its trained tokens; -1 as above."""
    reward: float | None
    highest: int = -1
    """Highest version number among all its tokens, trained or not; -1 when there is none."""

    @property
    def demonstration(self) -> bool:
        """Whether it is trained on and no model sampled what is trained."""
        return self.num_tokens > 0 and self.oldest < 0


class Rollouts(msgspec.Struct, frozen=True):
    """One or more whole rollouts of a task."""

    sequence: int
    source: str
    task: int
    group_size: int
    rollouts: tuple[RolloutView, ...]
    top_token: int = 0
    """Highest token id of the message."""


class Ended(msgspec.Struct, frozen=True):
    """A tombstone: the task (rollout None) or one rollout gives no sample."""

    sequence: int
    source: str
    task: int
    rollout: int | None
    group_size: int
    reason: str
    detail: str = ""


class Rewarded(msgspec.Struct, frozen=True):
    """A reward that comes by itself."""

    sequence: int
    task: int
    rollout: int
    reward: float
    revision: int


class Marked(msgspec.Struct, frozen=True):
    """A note in the stream's order; it changes no decision."""

    sequence: int
    name: str


class Poison(msgspec.Struct, frozen=True):
    """A message that cannot be read. `task` is known when its headers say so."""

    sequence: int
    task: int | None
    reason: str


TASK_TEXT = re.compile(r"[0-9]{1,18}")
"""A task index as its header has it; 18 digits fit any 64-bit integer."""

Record = Rollouts | Ended | Rewarded | Marked | Poison


def judge(subject: str, sequence: int, body: bytes | memoryview, task_header: str | None) -> tuple[Record, SampleBatch | None]:
    """One stored message to one record, with the decoded samples when it has some.

    Args:
        subject: the message's subject; its second token says what it is.
        sequence: its stream sequence.
        body: its bytes.
        task_header: value of the `Streamrl-Task` header, if any.
    """
    where = f"{subject} sequence {sequence}"
    kind = kind_of(subject)
    try:
        if kind == "samples":
            batch = decode_samples(body, where=where)
            if task_header is not None and task_header != str(batch.task):
                raise SchemaError(f"expected samples of task {task_header} (header) at {where}, got task {batch.task}")
            return _rollouts(sequence, batch), batch
        if kind == "tombstones":
            stone = decode(body, Tombstone, where=where)
            record = Ended(sequence, stone.source, stone.task, stone.rollout, stone.group_size, stone.reason, stone.detail)
            if stone.task < 0 or stone.group_size < 1 or not 0 <= (stone.rollout or 0) < stone.group_size:
                raise SchemaError(f"expected a rollout below the group size in the tombstone at {where}, got {stone}")
            return record, None
        if kind == "rewards":
            update = decode(body, RewardUpdate, where=where)
            if not np.isfinite(update.reward):
                raise SchemaError(f"expected a finite reward at {where}, got {update.reward}")
            return Rewarded(sequence, update.task, update.rollout, update.reward, update.revision), None
        if kind == "marks":
            return Marked(sequence, decode(body, Mark, where=where).name), None
        raise SchemaError(f"expected samples, tombstones, rewards or marks at {where}, got {kind!r}")
    except SchemaError as error:
        named = int(task_header) if task_header is not None and TASK_TEXT.fullmatch(task_header) else None
        # A reward or a mark that cannot be read says nothing about whether its task ended.
        retires = named if kind in ("samples", "tombstones") else None
        return Poison(sequence, retires, error.message), None


def _rollouts(sequence: int, batch: SampleBatch) -> Rollouts:
    versions = batch.token_versions()
    views: dict[int, RolloutView] = {}
    for row in range(batch.num_rows):
        tokens = slice(batch.offsets[row], batch.offsets[row + 1])
        trained = batch.loss_mask[tokens] == 1
        sampled = versions[tokens][trained]
        sampled = sampled[sampled >= 0]
        oldest = int(sampled.min()) if len(sampled) else -1
        newest = int(sampled.max()) if len(sampled) else -1
        rollout = int(batch.rollouts[row])
        reward = float(batch.rewards[row])
        before = views.get(rollout)
        if before is not None:
            oldest = min((v for v in (oldest, before.oldest) if v >= 0), default=-1)
            newest = max(newest, before.newest)
        views[rollout] = RolloutView(
            rollout=rollout,
            num_samples=1 + (before.num_samples if before else 0),
            num_tokens=int(trained.sum()) + (before.num_tokens if before else 0),
            oldest=oldest,
            newest=newest,
            reward=None if np.isnan(reward) else reward,
            highest=max(int(versions[tokens].max()), before.highest if before else -1),
        )
    in_order = tuple(views[k] for k in sorted(views))
    return Rollouts(sequence, batch.source, batch.task, batch.group_size, in_order, int(batch.tokens.max()))
