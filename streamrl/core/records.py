"""What the fold reads: each message of the sample stream, judged and reduced to what decisions need.

`judge` turns one stored message into one record. It is a pure function of the message and never raises: what cannot be read becomes
a `Poison` record, which still retires its task when the headers name one.
"""

from __future__ import annotations

import math
import re

import msgspec
import numpy as np

from streamrl.core.repetition import Tails
from streamrl.errors import SchemaError
from streamrl.schemas.codec import decode
from streamrl.schemas.columns import FORMER_NAME, SCHEMA_NAME
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.digests import body_digest
from streamrl.schemas.ledger import REASON_LENGTH
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.samples import MARK_EPOCH, EpochMark, Mark, RewardUpdate, Status, Tombstone, is_agent, is_turn_temperature
from streamrl.schemas.subjects import kind_of
from streamrl.schemas.tasks import Sampling, turn_sampling


class Share(msgspec.Struct, frozen=True):
    """Some of a rollout's trained tokens: those of which the same may be doubted."""

    inexact: bool
    """Their versions are guesses."""
    truncated: bool
    """They are of a sample that a length limit truncated."""
    num_tokens: int
    oldest: int
    newest: int


class AgentView(msgspec.Struct, frozen=True):
    """The samples of a rollout that are trained on one agent's own reward."""

    agent: str
    samples: tuple[int, ...]
    """Their indices within the rollout, rising."""
    reward: float | None


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
    epochs: tuple[tuple[int, int, int], ...] = ()
    """(epoch, lowest number, highest number) of all its tokens, by epoch."""
    shares: tuple[Share, ...] = ()
    """All its trained tokens by what may be doubted of them; none where there is nothing."""
    agents: tuple[AgentView, ...] = ()
    """Those that have rewards of their own, by name."""
    grading: int = 0
    """The request for its reward (`Sample.grading`); 0: there is none."""

    @property
    def demonstration(self) -> bool:
        """Whether it is trained on and no model sampled what is trained."""
        return self.num_tokens > 0 and self.oldest < 0

    @property
    def length(self) -> int:
        """Tokens that a model has sampled for it, of which none has been left out yet (`without`).

        A demonstration has none, nor has a greedy rollout, of which none is trained: it is no answer to be counted with the others.
        """
        return 0 if self.demonstration else self.num_tokens

    @property
    def inexact(self) -> bool:
        """Whether the versions of some trained tokens are guesses."""
        return any(share.inexact for share in self.shares)

    @property
    def truncated(self) -> bool:
        """Whether a length limit truncated a sample that is trained on."""
        return any(share.truncated for share in self.shares)

    def without(self, *, inexact: bool, truncated: bool) -> RolloutView:
        """The same with those of its tokens not trained that are asked for."""
        if not self.shares:
            return self
        kept = [share for share in self.shares if not ((inexact and share.inexact) or (truncated and share.truncated))]
        return msgspec.structs.replace(
            self,
            num_tokens=sum(share.num_tokens for share in kept),
            oldest=min((share.oldest for share in kept if share.oldest >= 0), default=-1),
            newest=max((share.newest for share in kept), default=-1),
        )


class Rollouts(msgspec.Struct, frozen=True):
    """One or more whole rollouts of a task."""

    sequence: int
    source: str
    task: int
    group_size: int
    rollouts: tuple[RolloutView, ...]
    top_token: int = 0
    """Highest token id of the message."""
    longest: int = 0
    """Tokens of its longest sample."""
    tails: Tails | None = None
    """What repetition is measured on."""


class Ended(msgspec.Struct, frozen=True):
    """A tombstone: the task (rollout None) or one rollout gives no sample."""

    sequence: int
    source: str
    task: int
    rollout: int | None
    group_size: int
    reason: str
    detail: str = ""
    grading: int = 0
    """The grading that failed; 0: it is not for that."""


class Rewarded(msgspec.Struct, frozen=True):
    """A reward that comes by itself."""

    sequence: int
    task: int
    rollout: int
    reward: float
    revision: int
    sample: int | None = None
    agent: str = ""
    """Whose own reward it is; empty: it is the rollout's."""
    grading: int = 0
    """The request that it answers; 0: none, it is for whichever attempt at its rollout counts."""


class Forked(msgspec.Struct, frozen=True):
    """From here on there are versions of `epoch`, from `first` on; the epoch before it ended with `last_before`."""

    sequence: int
    epoch: int
    first: int
    last_before: int


class Marked(msgspec.Struct, frozen=True):
    """A note in the stream's order; it changes no decision."""

    sequence: int
    name: str


class Poison(msgspec.Struct, frozen=True):
    """A message that cannot be read. `task` is known when its headers say so, or when its body does and is as it was published."""

    sequence: int
    task: int | None
    reason: str


TASK_TEXT = re.compile(r"[0-9]{1,18}")
"""A task index as its header has it; 18 digits fit any 64-bit integer."""

Record = Rollouts | Ended | Rewarded | Forked | Marked | Poison


def judge(
    subject: str,
    sequence: int,
    body: bytes | memoryview,
    task_header: str | None,
    *,
    digest: str | None = None,
    schema: str | None = None,
    decoded: SampleBatch | None = None,
) -> tuple[Record, SampleBatch | None]:
    """One stored message to one record, with the decoded samples when it has some.

    Args:
        subject: the message's subject; its second token says what it is.
        sequence: its stream sequence.
        body: its bytes.
        task_header: value of the `Streamrl-Task` header, if any.
        digest: value of the `Streamrl-Digest` header, if any.
        schema: value of the `Streamrl-Schema` header, if any.
        decoded: the samples in the body, where they have been decoded with others'.
    """
    where = f"{subject} sequence {sequence}"
    kind = kind_of(subject)
    named = int(task_header) if task_header is not None and TASK_TEXT.fullmatch(task_header) else None
    try:
        if digest is not None and digest != body_digest(body):
            raise SchemaError(f"expected a body with digest {digest[:16]!r} (header) at {where}, got one with {body_digest(body)[:16]!r}")
        if kind == "samples":
            if schema is not None and schema not in (SCHEMA_NAME, FORMER_NAME):
                raise SchemaError(f"expected sample schema {SCHEMA_NAME} at {where}, got {schema[:40]!r} (header)")
            batch = decoded or decode_samples(body, where=where)
            if task_header is not None and task_header != str(batch.task):
                # With a digest that fits, the body is what was published, and it is the header that was written wrongly.
                named = named if digest is None else batch.task
                raise SchemaError(f"expected samples of task {task_header[:20]} (header) at {where}, got task {batch.task}")
            _check_turns(batch, where)
            return _rollouts(sequence, batch), batch
        return _others(kind, sequence, body, where), None
    except SchemaError as error:
        # A reward or a mark that cannot be read says nothing about whether its task ended.
        return Poison(sequence, None if kind in ("rewards", "marks") else named, error.message[:REASON_LENGTH]), None


def _check_turns(batch: SampleBatch, where: str) -> None:
    """Refuse turns that no trainer could compute: greedy ones, and ones of penalties or a grammar that are not marked as inexact."""
    texts = {text for row in batch.optional("turn_sampling") or () for text in row or () if text is not None}
    for text in texts:
        said = msgspec.json.decode(text)
        try:
            turn_sampling(Sampling(), said)
        except SchemaError as error:
            raise SchemaError(f"expected what a turn says of its sampling at {where}, got {text[:80]}: {error.message}") from error
        if not is_turn_temperature(said.get("temperature", 1.0)):
            raise SchemaError(f"expected a turn with a temperature above 0, and below 1e30, at {where}, got {text[:80]}")
    if not texts and not batch.later:
        return
    try:
        hidden = batch.uncomputed & batch.loss_mask.astype(bool) & (batch.token_versions() >= 0)  # demonstrations are drawn by nobody
    except SchemaError as error:  # a turn's json_schema beside its row's regex
        raise SchemaError(f"expected a turn's sampling to go with its row's at {where}: {error.message}") from error
    if (hidden if batch.inexact is None else hidden & ~batch.inexact).any():
        raise SchemaError(f"expected tokens drawn with penalties or a grammar to be of turns that are marked as inexact at {where}")


def _others(kind: str, sequence: int, body: bytes | memoryview, where: str) -> Ended | Rewarded | Forked | Marked:
    if kind == "tombstones":
        stone = decode(body, Tombstone, where=where)
        if stone.task < 0 or stone.group_size < 1 or not 0 <= (stone.rollout or 0) < stone.group_size:
            raise SchemaError(f"expected a rollout below the group size in the tombstone at {where}, got {stone}")
        detail = stone.detail[:REASON_LENGTH]
        reason, grading = stone.reason[:REASON_LENGTH], _grading(stone.grading, where)
        if grading and stone.rollout is None:
            raise SchemaError(f"expected a rollout whose grading failed in the tombstone at {where}, got {stone}")
        return Ended(sequence, stone.source, stone.task, stone.rollout, stone.group_size, reason, detail, grading)
    if kind == "rewards":
        update = decode(body, RewardUpdate, where=where)
        if not np.isfinite(update.reward):
            raise SchemaError(f"expected a finite reward at {where}, got {update.reward}")
        if min(update.task, update.rollout, update.sample or 0) < 0 or update.revision < 1:
            raise SchemaError(f"expected task, rollout and sample of at least 0 and a revision of at least 1 at {where}, got {update}")
        agent = "" if isinstance(update.agent, msgspec.UnsetType) else update.agent
        if agent and not is_agent(agent):
            raise SchemaError(f"expected an agent of letters, digits and _.- with at most one slash at {where}, got {agent[:80]!r}")
        grading = _grading(update.grading, where)
        return Rewarded(sequence, update.task, update.rollout, update.reward, update.revision, update.sample, agent, grading)
    if kind == "marks":
        mark = decode(body, Mark, where=where)
        return _forked(sequence, mark, where) if mark.name == MARK_EPOCH else Marked(sequence, mark.name)
    raise SchemaError(f"expected samples, tombstones, rewards or marks at {where}, got {kind!r}")


def _grading(said: int | msgspec.UnsetType, where: str) -> int:
    if said is msgspec.UNSET:
        return 0
    if not 0 < said < 1 << 63:
        raise SchemaError(f"expected the number of a request for a reward, from 1 on, at {where}, got {said}")
    return said


def _forked(sequence: int, mark: Mark, where: str) -> Forked:
    try:
        fork = msgspec.convert(mark.detail, EpochMark)
    except msgspec.ValidationError as error:
        raise SchemaError(f"expected an epoch mark at {where}, got {mark.detail}: {error}") from error
    if not (fork.epoch >= 1 and 0 <= fork.first <= fork.last_before + 1):
        raise SchemaError(f"expected an epoch that begins within or right behind the one before it at {where}, got {fork}")
    return Forked(sequence, fork.epoch, fork.first, fork.last_before)


def _rollouts(sequence: int, batch: SampleBatch) -> Rollouts:
    """A span at a time: all tokens of a span share its version, so that none has to be looked at."""
    bounds, rollouts, rewards = batch.span_offsets.tolist(), batch.rollouts.tolist(), batch.rewards.tolist()
    trained, epochs, numbers = batch.trained_in_spans.tolist(), batch.span_epoch.tolist(), batch.span_number.tolist()
    views: dict[int, RolloutView] = {}
    for row, rollout in enumerate(rollouts):
        before = views.get(rollout)
        num_samples, num_tokens, highest, ranges, learned = 1, 0, -1, [], []
        if before is not None:
            num_samples, num_tokens, highest, ranges = 1 + before.num_samples, before.num_tokens, before.highest, list(before.epochs)
            learned = [v for v in (before.oldest, before.newest) if v >= 0]
        for span in range(bounds[row], bounds[row + 1]):
            number, count = numbers[span], trained[span]
            num_tokens += count
            if number >= 0:
                ranges.append((epochs[span], number, number))
                highest = max(highest, number)
                if count:
                    learned.append(number)
        views[rollout] = RolloutView(
            rollout=rollout,
            num_samples=num_samples,
            num_tokens=num_tokens,
            oldest=min(learned) if learned else -1,
            newest=max(learned) if learned else -1,
            reward=None if math.isnan(rewards[row]) else rewards[row],
            highest=highest,
            epochs=_merged(ranges),
        )
    for rollout, shares in _shares(batch).items():
        views[rollout] = msgspec.structs.replace(views[rollout], shares=shares)
    for rollout, agents in _agents(batch).items():
        views[rollout] = msgspec.structs.replace(views[rollout], agents=agents)
    for rollout, grading in zip(rollouts, batch.optional("grading") or (), strict=False):  # samples of a rollout name the same
        if grading:
            views[rollout] = msgspec.structs.replace(views[rollout], grading=grading)
    in_order = tuple(views[k] for k in sorted(views))
    top, longest = int(batch.tokens.max()), int(batch.lengths.max())
    return Rollouts(sequence, batch.source, batch.task, batch.group_size, in_order, top, longest, Tails(batch))


def _agents(batch: SampleBatch) -> dict[int, tuple[AgentView, ...]]:
    """The agents of each rollout that has some."""
    if not batch.agents:  # nearly always
        return {}
    found: dict[int, dict[str, AgentView]] = {}
    rows = zip(batch.rollouts.tolist(), batch.agents, batch.ints("sample").tolist(), batch.agent_rewards, strict=True)
    for rollout, agent, sample, reward in rows:
        if agent:
            of = found.setdefault(rollout, {})
            samples = of[agent].samples if agent in of else ()
            of[agent] = AgentView(agent, tuple(sorted((*samples, sample))), reward)
    return {rollout: tuple(of[agent] for agent in sorted(of)) for rollout, of in found.items()}


def _shares(batch: SampleBatch) -> dict[int, tuple[Share, ...]]:
    """The shares of each rollout of which something may be doubted."""
    statuses, inexact = batch.texts("status"), batch.inexact
    if inexact is None and Status.TRUNCATED not in statuses:
        return {}
    truncated = [status == Status.TRUNCATED for status in statuses]
    guessed = None if inexact is None else batch.in_spans(batch.loss_mask & inexact).tolist()
    bounds, trained, numbers = batch.span_offsets.tolist(), batch.trained_in_spans.tolist(), batch.span_number.tolist()
    rows = batch.rollouts.tolist()
    ended = {rollout for rollout, one in zip(rows, truncated, strict=True) if one}
    found: dict[int, dict[tuple[bool, bool], list[tuple[int, int]]]] = {}
    for row, rollout in enumerate(rows):
        if guessed is None and rollout not in ended:
            continue
        of = found.setdefault(rollout, {})
        for span in range(bounds[row], bounds[row + 1]):
            doubted = 0 if guessed is None else guessed[span]
            if doubted:
                of.setdefault((True, truncated[row]), []).append((doubted, numbers[span]))
            if trained[span] > doubted:
                of.setdefault((False, truncated[row]), []).append((trained[span] - doubted, numbers[span]))
    return {
        rollout: tuple(_share(*flags, tokens) for flags, tokens in sorted(of.items()))
        for rollout, of in found.items()
        if any(flags != (False, False) for flags in of)
    }


def _share(inexact: bool, truncated: bool, tokens: list[tuple[int, int]]) -> Share:
    """Of (count, version number) for each span."""
    sampled = [number for _, number in tokens if number >= 0]
    count = sum(count for count, _ in tokens)
    return Share(inexact, truncated, count, min(sampled, default=-1), max(sampled, default=-1))


def _merged(ranges: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """One (epoch, lowest, highest) for each epoch, rising."""
    if len(ranges) == 1:  # nearly always
        return (ranges[0],)
    merged: dict[int, tuple[int, int]] = {}
    for epoch, low, high in ranges:
        lowest, highest = merged.get(epoch, (low, high))
        merged[epoch] = (min(low, lowest), max(high, highest))
    return tuple((epoch, *merged[epoch]) for epoch in sorted(merged))
