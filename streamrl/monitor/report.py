"""`streamrl status RUN --json` has the same keys for a run that is up, from its bus, and for one that has ended, from its files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streamrl.config.evaluation_sets import HELDOUT
from streamrl.monitor.numbers import Account, EngineLine, Finding, Glance, RunNumbers, Standing, WorkerLine
from streamrl.monitor.run_state import PREPARING, REMOVING, RunState
from streamrl.monitor.runs import RunLine
from streamrl.monitor.summary import Summary


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as programs read it. A key is always there; None: not known, or nothing of the kind now.

    A later version may add keys, but will neither remove one nor change what one means. docs/operations.md has the table.
    """

    run: str
    path: str
    state: str
    """See `RunLine.state`."""
    live: bool
    """The run is up, and the numbers are of this moment."""
    away: str = ""
    """Why a run that is up is not `live`."""
    time_s: float
    """Unix seconds of this look."""
    supervisor: int | None
    """See `RunLine.supervisor`."""
    began_s: float | None
    ended_s: float | None
    error: str
    note: str
    parent: str
    model: str
    phase: str | None = None
    """`starting`, `warm-up`, `training` or `finished`; None unless `live`."""
    step: int | None
    steps: int
    warmup_step: int | None = None
    """Batches of the warm-up so far."""
    version: str | None = None
    learning: str | None = None
    """See `Learning`."""
    verdict: str = ""
    """The sentence."""
    reward: float | None = None
    """Mean of the newest batches, at most 20."""
    reward_first: float | None = None
    loss: float | None = None
    loss_first: float | None = None
    heldout: float | None = None
    heldout_first: float | None = None
    heldout_interval: tuple[float, float] | None = None
    """95 % bootstrap interval of `heldout`."""
    heldout_set: str = HELDOUT
    steps_per_minute: float | None = None
    rollouts_per_s: float | None = None
    made_per_s: float | None = None
    """Tokens that the engines sample."""
    trained_per_s: float | None = None
    """Tokens in trained batches, prompts included."""
    left_s: float | None = None
    wall_s: float | None = None
    """Time that the run was up, all its sessions together."""
    staleness_p50: float | None = None
    """Median age of the trained groups, in versions."""
    staleness_p95: float | None = None
    staleness_max: int | None = None
    stream_lag: int | None = None
    """Messages on the sample stream behind the newest batch."""
    stream_s: float | None = None
    """Age of the oldest of them."""
    tasks_in_flight: int | None = None
    tokens_made: int | None = None
    tokens_trained: int | None = None
    ended_rollouts: int | None = None
    """Trained or dropped."""
    dropped: int | None = None
    drops: Mapping[str, int] = {}
    """The same by reason."""
    failed_rollouts: int | None = None
    newest_error: str = ""
    unusable_rows: Sequence[str] = ()
    """See `RunNumbers.unusable_rows`."""
    lengths: Mapping[str, tuple[int, ...]] = {}
    """See `RunNumbers.lengths`."""
    length_distance: float | None = None
    standing: Standing | None = None
    """The cause, while nothing moves."""
    slo: Sequence[Finding] = ()
    """Objectives that are not met."""
    engines: Sequence[EngineLine] = ()
    workers: Sequence[WorkerLine] = ()
    """Each with its `state`: what it does or waits for."""
    account: Account | None = None
    checkpoints: Sequence[str]
    """Versions that a restart can go back to, the newest first."""
    one_login: bool
    """All roles share one login of a cluster."""


_OF_GLANCE = (
    *("reward", "reward_first", "loss", "loss_first", "heldout", "heldout_first", "heldout_interval", "heldout_set"),
    "account",
)
_OF_NUMBERS = (
    *_OF_GLANCE,
    *("warmup_step", "staleness_p50", "staleness_p95", "staleness_max", "tokens_made", "tokens_trained"),
    *("ended_rollouts", "dropped", "drops", "failed_rollouts", "newest_error", "unusable_rows", "lengths", "length_distance"),
)
_OF_THIS_MOMENT = (
    *("phase", "steps_per_minute", "rollouts_per_s", "made_per_s", "trained_per_s", "left_s", "stream_lag", "stream_s", "tasks_in_flight"),
    *("standing", "slo", "engines", "workers"),
)
_OF_SUMMARY = (
    *("reward_first", "loss_first", "heldout_first", "tokens_made", "tokens_trained", "staleness_p50", "staleness_max"),
    *("ended_rollouts", "dropped", "drops", "failed_rollouts", "newest_error", "unusable_rows", "wall_s", "account", "verdict"),
)


def report_of(
    line: RunLine, numbers: RunNumbers | None, *, last: RunState | None, checkpoints: Sequence[str] = (), one_login: bool = False
) -> Report:
    """Everything that is known of a run.

    Args:
        line: what its directory says.
        numbers: of this moment; None: its bus does not answer, or it is not up.
        last: its `state.json`.
        checkpoints: versions, the newest first.
        one_login: see `Report`.
    """
    up = line.supervisor is not None
    found = _from_files(last, line.summary, checkpoints)
    if numbers is not None:
        verdict = numbers.verdict
        found |= _taken(numbers, _OF_NUMBERS) | {"wall_s": numbers.elapsed_s, "step": numbers.step, "steps": numbers.steps or line.steps}
        found |= {"version": numbers.version} if numbers.version != "-" else {}
        found |= {"verdict": verdict.text, "learning": verdict.learning} if verdict is not None else {}
        found |= _taken(numbers, _OF_THIS_MOMENT) if up else {}
    own = ("run", "path", "state", "supervisor", "began_s", "ended_s", "step", "steps", "error", "note", "parent", "model")
    return Report(
        **_taken(line, own) | found,
        live=numbers is not None and up,
        away=away_text(line, numbers),
        time_s=time.time(),
        checkpoints=checkpoints,
        one_login=one_login,
    )


def away_text(line: RunLine, numbers: RunNumbers | None) -> str:
    """Why the numbers of a run that is up are not of this moment; empty: they are, or it is not up."""
    if numbers is not None or line.supervisor is None or line.state in (PREPARING, REMOVING):
        return ""
    return "a branch has no bus" if line.parent else "its bus does not answer"


def _from_files(last: RunState | None, summary: Summary | None, checkpoints: Sequence[str]) -> dict[str, Any]:
    """The summary is of the last stop; `state.json`, where it is of this version, is as new or newer."""
    found: dict[str, Any] = {"version": checkpoints[0]} if checkpoints else {}
    if summary is not None:
        found |= _taken(summary, _OF_SUMMARY)
        found |= {"reward": summary.reward_last, "loss": summary.loss_last, "heldout": summary.heldout_last}
    if last is not None:
        found |= {"lengths": last.lengths, "length_distance": last.length_distance}
        if (glance := last.glance) is not None:
            found |= _of_glance(glance)
    return found


def _of_glance(glance: Glance) -> dict[str, Any]:
    found = {key: value for key, value in _taken(glance, _OF_GLANCE).items() if value is not None}
    if glance.version:
        found["version"] = glance.version
    if glance.verdict is not None:
        found |= {"verdict": glance.verdict.text, "learning": glance.verdict.learning}
    return found


def _taken(struct: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in names}
