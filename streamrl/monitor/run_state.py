"""What a run directory says of the last session without a bus: a small file that the supervisor writes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec

from streamrl.monitor.numbers import Glance
from streamrl.runtime.rundir import RunDir
from streamrl.system import write_private

logger = logging.getLogger(__name__)

PREPARING = "preparing"
RUNNING = "running"
INTERRUPTED = "interrupted"
REMOVING = "removing"
LENGTHS_S = 20.0
"""Seconds between two writes for lengths and times alone, which change with every answer: a write waits for the disk."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `state.json`."""

    state: str
    """`running` while it is up, and for ever when it was killed; then `finished`, `stopped` (drained) or `failed`;
    `removing` from when its removal begins."""
    step: int = 0
    """Batches of reinforcement learning so far."""
    steps: int = 0
    """Where the run ends."""
    error: str = ""
    """Why it failed."""
    lengths: Mapping[str, tuple[int, ...]] = {}
    """Histograms of answer lengths (`streamrl.core.lengths`): finished, cut, trained, dropped; the newest weigh most."""
    length_distance: float | None = None
    """How far those of trained answers are from those of all that were decided on; None: too few to say."""
    length_cut: bool = False
    """Whether cut answers are in it."""
    glance: Glance | None = None
    """The numbers that people look at first; None: of an earlier build, or nothing is known yet."""


class StateFile:
    """`state.json` of a session. A disk that is full must not end a run: what cannot be written is logged.

    Args:
        run: its directory.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._told: RunState | None = None
        self._told_s = -math.inf

    def tell(self, state: RunState, *, now_s: float) -> None:
        """Write what is new of it: a step or the state at once, the rest every `LENGTHS_S` at `now_s` on the monotonic clock."""
        if state == self._told or (_but_lengths(state) == _but_lengths(self._told) and now_s - self._told_s < LENGTHS_S):
            return
        try:
            write_state(self._run, state)
        except OSError as error:
            logger.warning("event=state_not_written error=%s", error)
        self._told, self._told_s = state, now_s


def _but_lengths(state: RunState | None) -> tuple[object, ...] | None:
    if state is None:
        return None
    glance = state.glance
    seen = None if glance is None else (glance.verdict and glance.verdict.learning, glance.heldout)
    return state.state, state.step, state.steps, state.error, seen


def write_state(run: RunDir, state: RunState) -> None:
    """Replace the file; raises OSError."""
    write_private(run.state_path, msgspec.json.encode(state))


def read_state(run: RunDir) -> RunState | None:
    """None where there is none, or none that can be read: runs of earlier versions."""
    try:
        return msgspec.json.decode(run.state_path.read_bytes(), type=RunState)
    except (OSError, msgspec.MsgspecError):
        return None
