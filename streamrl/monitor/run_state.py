"""What a run directory says of the last session without a bus: a small file that the supervisor writes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from streamrl.config.files import write_private
from streamrl.runtime.rundir import RunDir

PREPARING = "preparing"
RUNNING = "running"
INTERRUPTED = "interrupted"


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `state.json`."""

    state: str
    """`running` while it is up, and for ever when it was killed; then `finished`, `stopped` (drained) or `failed`."""
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


def write_state(run: RunDir, state: RunState) -> None:
    """Replace the file; raises OSError."""
    write_private(run.state_path, msgspec.json.encode(state))


def read_state(run: RunDir) -> RunState | None:
    """None where there is none, or none that can be read: runs of earlier versions."""
    try:
        return msgspec.json.decode(run.state_path.read_bytes(), type=RunState)
    except (OSError, msgspec.MsgspecError):
        return None
