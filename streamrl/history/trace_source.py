"""The log that `trace` and `inspect` read: that of a run, up or not, with a reader's rights, or a recording."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from streamrl.bus.permissions import READER
from streamrl.bus.protocol import Bus, Log
from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from streamrl.history.branch import BRANCH_FILE
from streamrl.history.record import RECORDING_FILE
from streamrl.history.record_log import RecordedLog
from streamrl.history.source import split_tap
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.subjects import Subjects


class TraceSource(msgspec.Struct, frozen=True, kw_only=True):
    """An opened log with what belongs to it."""

    config: Config
    subjects: Subjects
    trainer: str
    """Whose ledger counts."""
    log: Log
    bus: Bus | None
    """None: it is a recording."""
    run: RunDir | None
    """None: it is a recording."""
    model_dir: Path


@contextlib.asynccontextmanager
async def open_trace(text: str, *, base: Path | str = "runs") -> AsyncGenerator[TraceSource]:
    """The run (or as `RUN:TAP` one of its taps) or the recording that `text` names; nothing of it is written.

    Raises:
        ConfigError: there is none, or it is a branch, whose samples are its parent's.
        SchemaError: the recording cannot be read.
        LaunchError: somebody starts the run at this moment.
    """
    name, tap = split_tap(text)
    if (Path(name) / RECORDING_FILE).is_file():
        log = RecordedLog(Path(name))
        await _check_tap(log, Subjects(log.config.run.name), tap)
        yield TraceSource(
            config=log.config,
            subjects=Subjects(log.config.run.name),
            trainer=tap or log.config.trainer.name,
            log=log,
            bus=None,
            run=None,
            model_dir=log.model_dir,
        )
        return
    run = RunDir.find(name, base=base)
    if (run.path / BRANCH_FILE).is_file():
        raise ConfigError(
            f"expected a run with samples of its own, got the branch {run.name!r}, which was trained on its parent's",
            hint=f"the parent is named in {run.path / BRANCH_FILE}; trace the task there",
        )
    config = run.load_config()
    async with open_bus(run, role=READER) as bus:
        await _check_tap(bus, Subjects(config.run.name), tap)
        yield TraceSource(
            config=config,
            subjects=Subjects(config.run.name),
            trainer=tap or config.trainer.name,
            log=bus,
            bus=bus,
            run=run,
            model_dir=run.policy_dir(config),
        )


async def _check_tap(log: Log, subjects: Subjects, tap: str) -> None:
    if tap and await log.last(subjects.ledger(tap)) is None:
        raise ConfigError(
            f"expected a tap of run {subjects.run!r} that has trained, got {tap!r}, which has no ledger",
            hint="name the run alone for its own",
        )
