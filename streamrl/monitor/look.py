"""One look at a run: what the board shows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from streamrl.monitor.numbers import RunNumbers
from streamrl.monitor.recent import Recent, shares_of
from streamrl.monitor.series import RUN
from streamrl.monitor.summary import Summary
from streamrl.monitor.view import RunView


class SampleLine(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as people read it."""

    task: int
    rollout: int
    reward: float | None
    """None: it has none yet."""
    prompt: str
    """What stands before the first trained token."""
    answer: str
    """From there on."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a run."""

    run: str
    state: str
    """`running`, `finished`, `stopped`, `failed` or `interrupted`."""
    away: str = ""
    """Why the numbers are not of this moment; empty: they are."""
    numbers: RunNumbers | None = None
    """None until its bus has answered for the first time."""
    now_s: float = 0.0
    """Unix seconds."""
    samples_bytes: int = 0
    """Budget of the sample stream."""
    lag: dict[str, float] = {}
    """Ages and lags of the newest batch and window, by metric."""
    shares: dict[str, float] = {}
    """Of time in the newest window, and who starved (`trainer/share/...`, `starvation/...`), by metric."""
    goodput: dict[str, float] = {}
    """Tokens of the last minute by metric (`tokens/...`); `tokens/open` and `tokens/waiting` as they are now."""
    notes: tuple[str, ...] = ()
    """What workers wanted people to know, the oldest first."""
    samples: tuple[SampleLine, ...] = ()
    """The newest first."""
    summary: Summary | None = None
    """Of the last time it stopped."""


def look_of(
    view: RunView,
    numbers: RunNumbers,
    recent: Recent,
    *,
    state: str,
    away: str = "",
    samples_bytes: int = 0,
    notes: Sequence[str] = (),
    samples: Sequence[SampleLine] = (),
    summary: Summary | None = None,
) -> Look:
    """A look at this moment. `recent` is of the run's metrics file and is read on; the rest is as in `Look`."""
    now_s = time.time()
    recent.look(now_s)
    window = view.series.window.get(RUN, {}) if view.series else {}
    entry = view.trained.newest
    lag = {**window, **(entry.metrics if entry else {})}
    return Look(
        run=view.run,
        state=state,
        away=away,
        numbers=numbers,
        now_s=now_s,
        samples_bytes=samples_bytes,
        lag={name: value for name, value in lag.items() if name.startswith(("lag/", "staleness/"))},
        shares=recent.shares or shares_of(window),
        goodput=recent.goodput,
        notes=tuple(notes),
        samples=tuple(samples),
        summary=summary,
    )
