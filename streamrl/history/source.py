"""What the verbs that look back read: a run (up or not), a branch, a tap of a run, or a recording on disk."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from streamrl.bus.permissions import READER
from streamrl.bus.protocol import Bus, Log
from streamrl.bus.reading import read_key, stretch
from streamrl.config.load import dump
from streamrl.config.tree import Config
from streamrl.consumers.training.checkpoints import read_latest
from streamrl.consumers.training.gaps import versions_made
from streamrl.errors import ConfigError, SchemaError
from streamrl.history.branch_file import read_branch_file, read_branch_ledger
from streamrl.history.record import RECORDING_FILE
from streamrl.history.record_log import RecordedLog
from streamrl.history.replay_log import read_initial_digest, read_past
from streamrl.monitor.decoded import evaluation_of
from streamrl.monitor.numbers import Evaluation
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.run_record import check_resume
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.control import RunRecord
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import EVENTS, KEY_RUN, RUN_ID, Subjects
from streamrl.schemas.versions import Version


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a branch or a tap was trained from: samples that another policy had made, and the rewards that those had earned."""

    parent: str
    """Run whose samples they are."""
    version: str = ""
    """Version that a branch begins at; empty for a tap."""
    overrides: tuple[str, ...] = ()
    """What a branch was told to change."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """An opened log with what belongs to it."""

    config: Config
    log: Log
    bus: Bus | None = None
    """None: it is a recording."""
    run: RunDir | None = None
    """None: it is a recording."""
    tap: str = ""
    """The tap whose ledger counts; empty: the run's own trainer's does."""
    model_dir: Path
    checkpoints: Path
    foreign: str
    """Whose code it names, where that is not known to be our own: see `streamrl.config.code.check_trust`."""
    record: RunRecord | None
    """What the run was started with, where it is known."""
    initial_digest: str
    """Digest of the version 0 that it published, where that is known."""
    highest: Version = Version()
    """The highest version that is known to have been made, whatever the ledger has."""

    @property
    def subjects(self) -> Subjects:
        """Of the run."""
        return Subjects(self.config.run.name)

    @property
    def trainer(self) -> str:
        """Whose ledger counts."""
        return self.tap or self.config.trainer.name

    @property
    def config_difference(self) -> str:
        """The first key that decides what is learned and is not what the run was started with, in words; else an empty string."""
        if self.record is None:
            return ""
        try:
            check_resume(self.record, replace(self.record, config=dump(self.config)))
        except ConfigError as error:
            return error.message
        return ""


@contextlib.asynccontextmanager
async def open_source(text: str, *, base: Path | str = "runs", looking: bool = False) -> AsyncGenerator[Source]:
    """The run or the recording that `text` names; a recording needs no server, and nothing of either is written.

    Args:
        text: name or directory.
        base: directory that holds the runs.
        looking: a reader's rights are enough, and `RUN:TAP` names one of the run's taps.

    Raises:
        ConfigError: there is none, or it is a branch, which has no stream of its own.
        SchemaError: the recording cannot be read.
        LaunchError: somebody starts the run at this moment.
    """
    name, tap = split_tap(text) if looking else (text, "")
    if (Path(name) / RECORDING_FILE).is_file():
        log = RecordedLog(Path(name))
        await _check_tap(log, log.config, tap)
        yield Source(
            tap=tap,
            config=log.config,
            log=log,
            model_dir=log.model_dir,
            checkpoints=log.checkpoints,
            foreign=f"the recording {name}",
            record=log.recording.record,
            initial_digest=log.recording.initial_digest,
            highest=log.highest,
        )
        return
    run = RunDir.find(name, base=base)
    if (run.path / BRANCH_FILE).is_file():
        raise ConfigError(
            f"expected a run with a stream of its own, got the branch {run.name!r}",
            hint=f"the parent is named in {run.path / BRANCH_FILE}: look there, or replay that with the same --set",
        )
    config = run.load_config()
    async with open_bus(run, role=READER if looking else "") as bus:
        await _check_tap(bus, config, tap)
        # Before anybody reads the ledger, which has a version before others know of it.
        latest = await read_latest(bus, config.trainer.name)
        made = await versions_made(bus, Subjects(config.run.name), latest, trainer=config.trainer.name, run_path=run.path)
        yield Source(
            config=config,
            log=bus,
            bus=bus,
            run=run,
            tap=tap,
            model_dir=run.policy_dir(config),
            checkpoints=run.checkpoints,
            foreign=run.foreign,
            record=await read_key(bus.kv, KEY_RUN, RunRecord),
            initial_digest=await read_initial_digest(bus),
            highest=max(made.values(), default=Version()),
        )


async def _check_tap(log: Log, config: Config, tap: str) -> None:
    if tap and await log.last(Subjects(config.run.name).ledger(tap)) is None:
        raise ConfigError(
            f"expected a tap of run {config.run.name!r} that has trained, got {tap!r}, which has no ledger",
            hint="name the run alone for its own",
        )


async def read_entries(text: str, *, base: Path | str = "runs") -> tuple[str, list[LedgerEntry]]:
    """Name and ledger of a run, a branch, a recording, or (as `RUN:NAME`) a tap; raises ConfigError when nothing was trained."""
    name, entries, _ = await read_side(text, base=base)
    return name, entries


async def read_side(text: str, *, base: Path | str = "runs") -> tuple[str, list[LedgerEntry], list[Evaluation]]:
    """The same, and the evaluations that were told in their order; a branch and a tap have none."""
    evaluations: list[Evaluation] = []
    name, trainer = split_tap(text)
    branch = [path for path in (Path(base) / name, Path(name)) if (path / BRANCH_FILE).is_file()]
    if branch:
        entries = read_branch_ledger(branch[0])
    else:
        async with open_source(name, base=base) as source:
            past = await read_past(source.log, Subjects(source.config.run.name), trainer or source.config.trainer.name)
            entries = past.between(min(past.entries, default=1) - 1, None)
            if not trainer:
                evaluations = await evaluations_in(source.log, Subjects(source.config.run.name))
    if not entries:
        raise ConfigError(f"expected a ledger with entries, got none for {text!r}", hint="has it trained? a tap is named RUN:NAME")
    return Path(text).name, entries, evaluations


def read_origin(text: str, *, base: Path | str = "runs") -> Origin | None:
    """Where the samples of what `read_entries` reads come from; None where they are its own. Raises SchemaError."""
    name, tap = split_tap(text)
    if tap:
        return Origin(parent=Path(name).name)
    found = next(filter(None, (read_branch_file(path) for path in (Path(base) / name, Path(name)))), None)
    return None if found is None else Origin(parent=found.parent, version=found.parent_version, overrides=found.overrides)


async def evaluations_in(log: Log, subjects: Subjects) -> list[Evaluation]:
    """What evaluators have told, in their order; events that are none are left out."""
    found: list[Evaluation] = []
    state = await log.state(EVENTS)
    async for message in stretch(log, EVENTS, first=state.first, last=state.last, subject=subjects.events("evaluation")):
        with contextlib.suppress(SchemaError):
            found.append(evaluation_of(decode(message.body, Event, where=f"events sequence {message.sequence}")))
    return found


def read_config(text: str, *, base: Path | str = "runs") -> Config:
    """The configuration of what `read_entries` reads; of a tap that of its last start."""
    if (Path(text) / RECORDING_FILE).is_file():
        return RecordedLog(Path(text)).config
    name, tap = split_tap(text)
    run = RunDir.find(name, base=base)
    return run.load_tap_config(tap) if tap else run.load_config()


def split_tap(text: str) -> tuple[str, str]:
    """(run, tap) of `RUN:TAP`; the tap is empty where none is named."""
    name, colon, trainer = text.rpartition(":")
    return (name, trainer) if colon and RUN_ID.fullmatch(trainer) and not Path(text).exists() else (text, "")
