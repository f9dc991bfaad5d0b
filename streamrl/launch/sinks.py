"""The processes of a run's sinks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from streamrl.config.tree import Config
from streamrl.launch.sidecars import Sidecar, Sidecars
from streamrl.runtime.kinds import SINK_KIND
from streamrl.runtime.rundir import RunDir

_DRAIN_S = 8.0


def sinks_beside(config: Config, run: RunDir, note: Callable[[str], None], *, drain_s: float = _DRAIN_S) -> Sidecars:
    """The sinks that `metrics.sinks` names, none twice; `note` hears of trouble, and at the end they have `drain_s` for what is left."""
    sinks = [
        Sidecar(
            kind=SINK_KIND.format(kind=kind),
            called=f"the sink {kind}",
            command=partial(_command, kind, str(run.path)),
            loses="its last rows",
        )
        for kind in dict.fromkeys(config.metrics.sinks)
    ]
    return Sidecars(sinks, run, config, note=note, drain_s=drain_s)


def _command(kind: str, run: str, again: bool) -> Sequence[str]:
    joined = ("--joined",) if again else ()
    return (sys.executable, "-m", "streamrl.monitor.sinks", kind, "--run", run, *joined)
