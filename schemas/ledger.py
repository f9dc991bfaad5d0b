"""The ledger: one entry per trained batch; with the sample stream it determines the whole run."""

from __future__ import annotations

import msgspec

from streamrl.schemas.versions import Version


class Drop(msgspec.Struct, frozen=True):
    """Something on the sample stream that is never trained, and why.

    One record names the rollouts of one message; no rollouts means the message as a whole. Reasons: `stale`, `duplicate`,
    `late` (its task had ended), `failed`, `filtered`, `deliveries`, `poison`, `zero_spread`, `empty` (not one token of the
    group is trained), `unrewarded` (its rewards did not come in time), `superseded_reward` (a reward that came after its task
    had ended, or is no newer than the one that is there).
    """

    sequence: int
    task: int
    rollouts: tuple[int, ...]
    reason: str
    detail: str = ""
    retires: bool = False
    """True on the one record that ends its task without training it."""


class Used(msgspec.Struct, frozen=True):
    """One group of a batch: its task, and for each of its rollouts in order the sequence of the message it lies in."""

    task: int
    rollouts: tuple[int, ...]
    sequences: tuple[int, ...]


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
