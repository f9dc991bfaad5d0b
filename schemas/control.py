"""Small records kept under keys: grants, positions, checkpoints, presence, the run itself."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from streamrl.schemas.versions import Version


class Grant(msgspec.Struct, frozen=True):
    """How many tasks may have been issued, with the trainer's state when it said so.

    `warmup_end` is the index of the first task after the warm-up, None while the warm-up goes on. Tasks below `first_open` have ended or
    all their rollouts have: work on them is in vain.

    Example: version 10 is trained from, 320 tasks have ended, batches are of 16 tasks and tokens may be 2 versions old. Task 321 is trained
    next, so any token from version 8 on will do; task 370 is trained 3 versions later and may not begin before version 10 is served.

        >>> grant = Grant(granted=368, version=10, retired=320)
        >>> grant.min_version(321, batch_tasks=16, max_staleness=2)
        8
        >>> grant.min_version(370, batch_tasks=16, max_staleness=2)
        10
    """

    granted: int
    version: int
    retired: int
    warmup_end: int | None = 0
    first_open: int | UnsetType = UNSET
    epoch: int | UnsetType = UNSET
    """Epoch of the version; not on the wire when unset: the first."""

    @property
    def of_epoch(self) -> int:
        """Epoch of the version."""
        return 0 if isinstance(self.epoch, UnsetType) else self.epoch

    def min_version(self, task: int, *, batch_tasks: int, max_staleness: int) -> int:
        """Lowest version number that may sample `task`: the one that keeps it within the bound when its turn to be trained comes.

        `task - retired` tasks are open before it, so it is trained `(task - retired) // batch_tasks` versions after this grant's at the
        soonest. Never above the grant's version.
        """
        ahead = (task - self.retired) // batch_tasks
        return min(self.version, max(0, self.version + ahead - max_staleness))


class MicroBudget(msgspec.Struct, frozen=True):
    """Key `budgets/<trainer>`: what a trainer that was out of memory goes on with."""

    configured: int
    """`trainer.micro_tokens` at that time; with another value the key means nothing."""
    micro_tokens: int
    """Tokens of one forward and backward pass."""
    failed: int | msgspec.UnsetType = msgspec.UNSET
    """Number of the version whose step was out of memory the last time: whatever the ledger says of it, it is trained by this one. Not on
    the wire when unset."""


class Position(msgspec.Struct, frozen=True):
    """A reader's lease on a stream: nothing at or above `oldest_needed` may be trimmed."""

    reader: str
    stream: str
    oldest_needed: int
    version: Version
    carried: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Tasks of messages that its checkpoints hold themselves: what their samples name is needed. Not on the wire when unset."""


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Key `ends/<trainer>`: the run has finished (`streamrl.runtime.run_end`)."""

    version: Version
    """The last one, which is in the ledger, in a checkpoint and published."""
    steps: int
    """Batches trained, warm-up not counted."""
    limit: str
    """Key of the section `run` that was reached: `steps`, `max_seconds` or `until_reward`."""
    fence: int
    """Fencing token of the trainer that wrote it; it counts while there is no higher one."""


class Latest(msgspec.Struct, frozen=True):
    """The newest complete checkpoint of a trainer."""

    trainer: str
    version: Version
    path: str
    """Relative to the run directory."""
    cursor: int
    oldest_needed: int
    """Lowest sequence that a restart reads from the stream."""
    stream_identity: str = ""
    carried: tuple[int, ...] = ()
    """Sequences below `oldest_needed` of messages that the checkpoint holds itself."""
    older: tuple[Latest, ...] | msgspec.UnsetType = msgspec.UNSET
    """Checkpoints that a restart may go back to, the newest first; none of them has any itself. Not on the wire when unset."""
    carried_tasks: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Of which task each of the `carried` is. Not on the wire when unset."""

    @property
    def kept(self) -> tuple[Latest, ...]:
        """It and the older ones, the newest first."""
        return (self, *(() if isinstance(self.older, msgspec.UnsetType) else self.older))


ROLLOUT_ROLE = "rollout"
"""Role of engines that serve the newest version."""
EVALUATION_ROLE = "evaluation"
"""Role of engines that serve pinned versions only."""


class EnginePresence(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that can be asked; the key expires unless it is put again."""

    engine: str
    address: str
    """`http://host:port`."""
    policy: str = "policy"
    serving: Version | None = None
    """None until its first weights are in."""
    running: int = 0
    waiting: int = 0
    slots: int = 0
    role: str = ROLLOUT_ROLE
    tokens_total: int = 0
    swaps_total: int = 0
    max_len: int | msgspec.UnsetType = msgspec.UNSET
    """Longest sequence in tokens, prompt included; unset: not known."""
    degraded: str | msgspec.UnsetType = msgspec.UNSET
    """What it does otherwise than it was asked to, and why; unset: nothing."""


class WorkerPresence(msgspec.Struct, frozen=True, kw_only=True):
    """Any other worker, for `streamrl status`."""

    worker: str
    kind: str
    state: str = "running"
    """What it does or waits for, in words for people."""
    pid: int = 0
    host: str = ""
    detail: dict[str, Any] = {}
    since_s: float | msgspec.UnsetType = msgspec.UNSET
    """Unix seconds since when it has been in this state; not on the wire when unset."""


class Untrained(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A trainer says this in `WorkerPresence.detail` of the time since its newest batch, or since the run began."""

    ended: dict[str, int] = {}
    """Rollouts that have ended without being trained, by reason (`streamrl.schemas.ledger.Drop`); producers' own words are `other`."""
    dead: int = 0
    """Messages that could not be used."""
    newest_dead: str = ""
    """Why the last of them could not."""
    unrewarded: int = 0
    """Groups that are complete but for their rewards."""
    rewarded: int = 0
    """Rollouts whose group was complete, trained or dropped."""
    reward: float = 0.0
    """Their mean reward; 0.0 where there are none."""
    publishing: str = ""
    """The version that is being published; empty: none is."""


class DataRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Key `data`: what the feeder found in the training rows when it had gone through them; written once, and compared at each start."""

    rows: int
    digest: str
    """SHA-256 (hex) of where each row begins, or of the counts of row groups and the schema."""


class MixtureSegment(msgspec.Struct, frozen=True, kw_only=True):
    """From one task on, which part of the tasks each source has."""

    first: int
    """Task after the warm-up, from 0."""
    version: int
    """Of the grant that it was decided at."""
    weights: tuple[float, ...]
    places: tuple[int, ...]
    """Tasks of each source before `first`."""


class MixtureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Key `mixture`: what the feeder decided about sources, before it issued tasks by it. With seed and index it gives a task's row."""

    sources: tuple[str, ...]
    segments: tuple[MixtureSegment, ...]
    """By `first`, rising."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is; written once, under the key `run`."""

    run: str
    config: str
    """The configuration as TOML or JSON text, without secrets."""
    dataset_digest: str
    num_rows: int
    """Rows that tasks are made of; 0 where they are counted while the run is up, see `DataRecord`."""
    code_version: str
    fingerprint: dict[str, str]
    created_s: float
    parent: str = ""
    code: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """The digest of the source of user code at the last start, by configuration key. Not on the wire when unset."""
    models: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """The digest of each model's folder, by configuration key (`streamrl.runtime.model_digests`). Not on the wire when unset."""
