"""What has become of the sample stream since the newest batch, for the trainer to say with each heartbeat: the ledger has it only later."""

from __future__ import annotations

from collections import Counter

from streamrl.core.state import FoldState
from streamrl.schemas.control import Untrained
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import counted_as

_ENDS_NOTHING = frozenset(("duplicate", "late", "superseded_reward"))
"""Reasons of drops that end no rollout."""
_REASON_CHARS = 300


class UntrainedCounts:
    """Counts of one trainer; `dead` is told by the training thread, `told` is asked by the bus's.

    Args:
        num_rollouts: of a task.
    """

    def __init__(self, num_rollouts: int) -> None:
        self._num_rollouts = num_rollouts
        self._version = Version()
        self._ended = Counter[str]()
        self._num_drops = 0
        self._dead: tuple[Version, int, str] = (self._version, 0, "")

    def dead(self, version: Version, reason: str) -> None:
        """A message cannot be used that was folded into the state of `version`."""
        known, count, _ = self._dead
        self._dead = (version, count + 1 if known == version else 1, reason[:_REASON_CHARS])

    def told(self, state: FoldState, publishing: str) -> Untrained:
        """What there is to say of the fold's state as it is now."""
        if state.version != self._version or state.num_drops < self._num_drops:
            self._version, self._ended, self._num_drops = state.version, Counter(), 0
        for drop in state.drops_after(self._num_drops):
            if drop.reason not in _ENDS_NOTHING:
                self._ended[counted_as(drop.reason)] += len(drop.rollouts) or (self._num_rollouts if drop.retires else 1)
        self._num_drops = state.num_drops
        version, dead, reason = self._dead
        same = version == state.version
        return Untrained(
            ended=dict(self._ended),
            dead=dead if same else 0,
            newest_dead=reason if same else "",
            unrewarded=sum(task.complete and not task.ready for task in state.pending.values()),
            publishing=publishing,
        )
