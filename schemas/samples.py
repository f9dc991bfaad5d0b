"""Samples: token sequences with exact provenance, and the records that stand in for them."""

from __future__ import annotations

import re
from enum import StrEnum
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.images import Image
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version


class Status(StrEnum):
    """How a sample ended."""

    COMPLETED = "completed"
    """The model stopped by itself."""
    TRUNCATED = "truncated"
    """A length limit ended it."""
    ABORTED = "aborted"
    """Generation was ended from outside."""
    FAILED = "failed"
    """A tool or environment failed; the tokens up to there are valid."""


LEAST_LOGPROB = -745.0
"""No sampler draws what is less likely: the probability is 0 in float64."""
MOST_LOGPROB = 1e-4
"""The log of a probability is at most 0; rounding may leave this above."""


class LogprobMode(StrEnum):
    """Which distribution the stored log-probs belong to."""

    SAMPLED = "sampled"
    """The one really drawn from: after temperature, top-k, top-p and min-p."""
    TEMPERATURE = "temperature"
    """Before top-k, top-p and min-p (SGLang's default)."""
    NONE = "none"
    """No sampler: demonstrations."""


class VersionSpan(msgspec.Struct, frozen=True):
    """`length` consecutive tokens sampled by one version; spans cover the model's tokens of a sample in order.

    Tokens that no model sampled (prompt, tool results) lie in spans whose `version` is None.
    """

    length: int
    version: Version | None


def is_turn_temperature(value: float) -> bool:
    """Whether a turn may be drawn at it where its sample says another one: a trainer divides by it in single precision."""
    return value is not True and 1e-30 < value < 1e30


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model within a sample: what is known of its `length` tokens from token `start` on, beside their versions."""

    start: int
    """Index of its first token in the sample."""
    length: int
    inexact: bool = False
    """Whether the versions of its tokens are guesses (none counts as younger than it is), or their distribution one that no trainer
    computes (`Sampling.inexact`)."""
    finish_reason: str = ""
    engine: str = ""
    asked_s: float = 0.0
    """Unix seconds at which the engine was asked; this and the next two are for people and metrics only, 0.0 where not known."""
    began_s: float = 0.0
    """At which the engine began to compute it."""
    finished_s: float = 0.0
    sampling: dict[str, Any] = {}
    """What is drawn otherwise than the sample's `sampling` says, by the names of its fields, as JSON has them (`turn_sampling`)."""


class Branch(msgspec.Struct, frozen=True):
    """Where a sample of a rollout has left another one. The first `num_shared` tokens of both are the same, trained in the parent only."""

    parent: int
    """Index of that sample within the rollout, below the branch's own."""
    num_shared: int


_AGENT = re.compile(r"[A-Za-z0-9_.-]{1,64}(/[A-Za-z0-9_.-]{1,64})?")


def is_agent(name: str) -> bool:
    """Whether an agent may have this name: a role, `rewriter`, or one of several agents of a role, `solver/2`."""
    return _AGENT.fullmatch(name) is not None


def role_of(agent: str) -> str:
    """The role of an agent: what stands before the slash of its name. Rewards of a role are compared within a group."""
    return agent.partition("/")[0]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence of a rollout. `T` = number of tokens, prompt included.

    Example: a prompt of two tokens, and an answer of two that version 3 and, after a change of weights, version 4 sampled.

        >>> sample = Sample(
        ...     run="r", policy="policy", source="main", task=5, rollout=0,
        ...     tokens=np.array([7, 8, 1, 5], np.int32),
        ...     loss_mask=np.array([0, 0, 1, 1], np.uint8),
        ...     logprobs=np.array([0, 0, -0.1, -0.7], np.float32),
        ...     spans=(VersionSpan(2, None), VersionSpan(1, Version(0, 3)), VersionSpan(1, Version(0, 4))),
        ...     reward=1.0,
        ... )
        >>> sum(span.length for span in sample.spans) == len(sample.tokens)
        True
    """

    run: str
    policy: str
    source: str
    task: int
    rollout: int
    """Index within the group, 0 .. group_size - 1."""
    sample: int = 0
    """Index within the rollout. Several samples (helpers, compaction) share the rollout's reward, which counts once, but for those of an
    `agent`."""
    group_size: int = 1
    """Rollouts of the task."""
    num_samples: int = 1
    """Samples of this rollout; all of them are in one message."""
    data_epoch: int = 0
    tokens: npt.NDArray[np.int32]
    """[T] int32."""
    loss_mask: npt.NDArray[np.uint8]
    """[T] uint8; 1 where the token is trained on. Never 1 on position 0 (nothing predicts it)."""
    logprobs: npt.NDArray[np.float32]
    """[T] float32; natural-log probability with which the token was drawn, 0.0 where no model sampled it."""
    spans: tuple[VersionSpan, ...]
    """Cover all T tokens, in order."""
    logprob_mode: LogprobMode = LogprobMode.SAMPLED
    reward: float | None = None
    """Of the rollout, the same in all its samples. None: not known yet (it comes as a RewardUpdate), or none (demonstrations)."""
    reward_parts: dict[str, float] = {}
    """Of the reward that the sample is trained on."""
    status: Status = Status.COMPLETED
    finish_reason: str = "stop"
    sampling: Sampling = Sampling()
    seed: int = 0
    label: Any = None
    metadata: dict[str, Any] = {}
    engine: str = ""
    """Id of the engine that sampled it (the last one, if several)."""
    producer: str = ""
    started_s: float = 0.0
    """Unix seconds; for people and metrics only."""
    finished_s: float = 0.0
    issued_s: float = 0.0
    """Unix seconds at which its task was issued; like the next four for people and metrics only, and 0 where not known."""
    claimed_s: float = 0.0
    """At which its task was claimed, by the claim that gave this sample."""
    deliveries: int = 0
    """How often its task had been claimed then; not on the wire where that is once."""
    began_s: float = 0.0
    """At which an engine began to compute its first turn."""
    scored_s: float = 0.0
    """At which its reward was known."""
    grading: int = 0
    """Sequence on the stream `grading` of the request for its reward (`streamrl.producers.grading`); 0, and not on the wire: there is
    none. What is graded at this request counts for no other attempt at its rollout."""
    turns: tuple[TurnSpan, ...] = ()
    """In order; they hold every trained token. None where nothing is to be said of them: one turn that took all the sample's time."""
    branch: Branch | None = None
    """None: it stands by itself, or others have left it."""
    routed_experts: BlobRef | None = None
    """A row for each token."""
    candidates: BlobRef | None = None
    """A row for each token: what else could have been drawn there, see `streamrl.schemas.candidates`."""
    images: BlobRef | None = None
    """A row for each image of its task's row, in order. Its tokens were sampled without them: no engine looks at images."""
    image_rows: tuple[Image, ...] = ()
    """What these rows hold."""
    counters: dict[str, float] = {}
    """Counts of the engine over the calls of its turns, such as cached or drafted tokens, by their names in `streamrl.engines.extras`."""
    agent: str = ""
    """Who made it, where that is one with a reward of its own (`is_agent`); empty: it is trained on the rollout's."""
    agent_reward: float | None = None
    """Of its agent, the same in all samples that this one has in the rollout. None: not known yet, or it has no agent."""

    @property
    def num_sampled(self) -> int:
        """Tokens that a model has sampled for it, trained or not; those that a branch shares count in its parent."""
        shared = 0 if self.branch is None else self.branch.num_shared
        ends = accumulate(span.length for span in self.spans)
        found = ((span.length, end) for span, end in zip(self.spans, ends, strict=True) if span.version is not None)
        return sum(max(0, min(length, end - shared)) for length, end in found)

    @property
    def trained_reward(self) -> float | None:
        """The reward that it is trained on."""
        return self.agent_reward if self.agent else self.reward


class Tombstone(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tombstone"):
    """Ends a task (rollout is None) or one of its rollouts without a sample."""

    task: int
    reason: str
    """`failed`, `filtered`, `timeout`, `deliveries`, `poison`, `lost` (by the trainer: nobody held it), `blob_missing` (by the
    trainer: what its samples name is not there), `row_too_long` and `row_broken` (of the data: there was nothing to roll out), what a
    filter of the user's says (`filter_reason`), or a producer's own word."""
    rollout: int | None = None
    group_size: int = 1
    detail: str = ""
    source: str = ""
    producer: str | msgspec.UnsetType = msgspec.UNSET
    """Whose claim ended so. Like the next three not on the wire when unset."""
    issued_s: float | msgspec.UnsetType = msgspec.UNSET
    """As a sample's."""
    claimed_s: float | msgspec.UnsetType = msgspec.UNSET
    deliveries: int | msgspec.UnsetType = msgspec.UNSET
    grading: int | msgspec.UnsetType = msgspec.UNSET
    """The grading that failed, if one did: it ends its rollout also when that has come, unless by another attempt, or with a reward."""


class RewardUpdate(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="reward"):
    """A reward that comes after its sample, or corrects it; the highest revision that came before training counts."""

    task: int
    rollout: int
    reward: float
    revision: int = 1
    reward_parts: dict[str, float] = {}
    sample: int | None = None
    """The sample of the rollout that was judged, None for all of them; whichever it is, they share the reward."""
    agent: str | msgspec.UnsetType = msgspec.UNSET
    """The agent of the rollout whose own reward it is; not on the wire where it is the rollout's."""
    grading: int | msgspec.UnsetType = msgspec.UNSET
    """The request that it answers (`Sample.grading`): it is for samples that name the same. Not on the wire when unset: for any."""


class Mark(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="mark"):
    """A note in the stream's order: a resume, a drain, a change of configuration; `MARK_EPOCH` alone is more than a note."""

    name: str
    detail: dict[str, Any] = {}


MARK_START = "start"
"""Name of the mark that `up` puts at each start of a run with user code; its detail has the `code` of the run record."""
MARK_EPOCH = "epoch"
"""Name of the mark whose detail is an EpochMark."""


class EpochMark(msgspec.Struct, frozen=True):
    """A restart has begun an epoch: versions `epoch.first` and on exist; of the epoch before it those up to `last_before` do.

    Other digits than the ledger's make it begin within the one before, ranks in other numbers also right behind it.

    It stands on the stream before any weights of the epoch are published, so before every token that they sample.
    """

    epoch: int
    first: int
    last_before: int
