"""Tap: a second trainer beside a live run. It reads the stream and the run's ledger, publishes no weights and grants nothing.

It has a name, a ledger, checkpoints and a position of its own. Its position is a lease: it keeps the stream from being trimmed under the
tap, and lapses when the tap has been gone for `lease_s`. What it trains is a branch of the run (`streamrl.history.branch_fold`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from streamrl.bus.protocol import Bus, Log
from streamrl.config.tree import Config
from streamrl.consumers.training.books import ledger_books
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.checkpoints import Checkpointer, ensure_position, read_latest
from streamrl.consumers.training.divergence import Divergence
from streamrl.consumers.training.ledger import open_ledger, take_fence
from streamrl.consumers.training.loop import in_own_warmup, trained_steps
from streamrl.consumers.training.reader import RecordReader
from streamrl.consumers.training.sample_blobs import NOTHING_REPLAYED, Replayed, replayed, sample_blobs
from streamrl.consumers.training.steps import log_notice, train_version
from streamrl.core.fold_config import fold_config
from streamrl.core.state import FoldState
from streamrl.data.model import ensure_model
from streamrl.data.vocabulary import vocab_size
from streamrl.errors import CheckpointDamaged, ConfigError
from streamrl.history.branch import changed_config
from streamrl.history.branch_fold import BranchFold, BranchState, begin, check_gaps, gap_in_the_way, parents_cut, translate
from streamrl.history.replay import find_start
from streamrl.history.replay_log import PastLedger, read_past, read_pending
from streamrl.history.tap_position import hold_stream, keeping_position
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import decode
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import LEDGER, Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.fingerprint import fingerprint_digest, numerics_fingerprint
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.ranks.local import open_trainer

logger = logging.getLogger(__name__)

LEASE_S = 60


class TapSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks for."""

    name: str
    """Name of the tap's trainer: its ledger, checkpoints and position."""
    overrides: tuple[str, ...] = ()
    first: int = 0
    """A new tap begins at the run's nearest checkpoint at or below this version number; 0: at the initial weights."""
    lease_s: int = LEASE_S
    """Whole seconds for which its position holds the stream after the tap was last heard of."""


def tap_config(config: Config, settings: TapSettings) -> Config:
    """The tap's configuration; raises ConfigError for a name or an override that a tap cannot have."""
    main = config.trainer.name
    if settings.name == main or settings.name.startswith(f"{main}-"):
        raise ConfigError(
            f"expected a name for the tap that is not {main!r} and does not begin with '{main}-', got {settings.name!r}",
            hint="those are the run's own trainer's",
        )
    if settings.lease_s < 3:
        raise ConfigError(f"the lease of a tap must be at least 3 seconds, got {settings.lease_s}", hint="it is renewed every third of it")
    changed = changed_config(config, settings.overrides)
    return replace(changed, trainer=replace(changed.trainer, name=settings.name))


async def tap(worker: Worker, settings: TapSettings, *, say: Callable[[str], None] = log_notice) -> BranchState:
    """Train beside the run until it has trained all its steps or the worker drains; `say` is told what people should know of that."""
    config = tap_config(worker.config, settings)
    worker.run_dir.write_tap_config(settings.name, config)
    loop = asyncio.get_running_loop()

    def work() -> BranchState:
        model_dir = ensure_model(config, worker.run_dir.model_dir)
        with open_trainer(config, model_dir) as trainer:
            live = Tap(
                config=config,
                parent=worker.config,
                settings=settings,
                bus=worker.bus,
                call=Caller(loop),
                trainer=trainer,
                run_dir=worker.run_dir,
                fingerprint=fingerprint_digest(numerics_fingerprint(config)),
                num_tokens=vocab_size(model_dir),
                replayed=replayed(config, model_dir),
                say=say,
            )
            return live.run(worker.draining.is_set)

    async with keeping_position(worker.bus, settings.name, lease_s=settings.lease_s):
        state = await asyncio.to_thread(work)
    logger.info("event=tap_done name=%s version=%s", settings.name, state.version)
    return state


class Tap:
    """One tap process. `run` is called once, from the training thread."""

    def __init__(
        self,
        *,
        config: Config,
        parent: Config,
        settings: TapSettings,
        bus: Bus,
        call: Caller,
        trainer: Trainer,
        run_dir: RunDir,
        fingerprint: str,
        num_tokens: int = 0,
        replayed: Replayed = NOTHING_REPLAYED,
        say: Callable[[str], None] = log_notice,
    ) -> None:
        self.config = config
        self.say = say
        self.parent = parent
        self.rules = fold_config(config, num_tokens)
        self.parent_rules = fold_config(parent, num_tokens)
        self.settings = settings
        self.bus = bus
        self.call = call
        self.trainer = trainer
        self.run_dir = run_dir
        self.fingerprint = fingerprint
        self.replayed = replayed
        self.subjects = Subjects(parent.run.name)

    def run(self, stop: Callable[[], bool]) -> BranchState:
        """Train until the run's last step, or until `stop` is true; the state returned is checkpointed.

        Raises:
            Fenced: another tap of the same name has taken over.
            Diverged: with run.numerics = "bitwise", a step gave other digits than the tap's own ledger.
            LogTruncated: the stream no longer goes back to where the tap stood.
            CheckpointDamaged: its checkpoint cannot be gone on from.
            ConfigError: the run has lost versions that the tap has yet to come to, or has trained already, and goes on after a gap.
        """
        call, name = self.call, self.settings.name
        fence = call(take_fence(self.bus, name))
        ledger = call(open_ledger(self.bus, self.subjects, name, fence=fence))
        latest = call(read_latest(self.bus, name))
        if latest is None:
            # Before a checkpoint is chosen: what the newest one needs may else be trimmed while it is being loaded.
            call(hold_stream(self.bus, name, lease_s=self.settings.lease_s))
        if latest:
            path: Path | None = self.run_dir.path / latest.path
            state = self._saved_state(path)
        else:
            state, path = self._first_state()
        past = self._past()
        check_gaps(state, past.entries, past.gaps, through=None, hint=self._another)
        pending = call(read_pending(self.bus, state.own, path, identity=latest.stream_identity if latest else ""))
        saver = Checkpointer(
            bus=self.bus,
            call=call,
            trainer=self.trainer,
            settings=self.config.trainer,
            run_path=self.run_dir.path,
            identity=pending.identity,
            lease_s=self.settings.lease_s,
        )
        saver.resumed(latest, pending.carried)
        if latest:
            call(ensure_position(self.bus, name, state, lease_s=self.settings.lease_s))
        else:
            # Whatever happens from here on, the tap goes on from this version: its ledger has no gap, and its position has moved up.
            saver.flush(state)
        parent = FollowedLedger(
            self.bus, call.loop, self.subjects, self.parent.trainer.name, after=state.parent, gaps=past.gaps, hint=self._another
        )
        reader = RecordReader(self.bus, call.loop, after=state.cursor, capacity=4 * self.config.tasks.batch_tasks)
        fold = BranchFold(
            reader=reader,
            parent=parent,
            config=self.rules,
            parent_config=self.parent_rules,
            state=state,
            messages={sequence: translate(samples, state.numbers) for sequence, samples in pending.samples.items()},
            gaps=parent.gaps,
            waiting=saver.while_waiting,  # a full stream may wait for this very position
            blobs=sample_blobs(self.bus, call.loop, self.replayed, self.config),
        )
        other = "was it started with other --set values? a tap with others needs another --name"
        books = ledger_books(ledger, call, self.config, self.fingerprint, hint=other, diverged=other)
        logger.info("event=tapping version=%s parent=%s cursor=%d fence=%d", state.version, state.parent.version, state.cursor, fence)
        try:
            cut = parents_cut(fold, self.config, self.parent)
            divergence = Divergence(self.config.trainer.max_unlearned, self.say)
            while stepped := train_version(fold, self.trainer, books, lambda: self._stops(fold.state, stop), cut=cut, say=self.say):
                divergence.check(stepped.state.version, stepped.result)
                saver.after_step(fold.state)
                if stop():  # a tap that is behind never waits
                    break
        finally:
            reader.close()
            parent.close()
        saver.flush(fold.state)
        return fold.state

    @property
    def _another(self) -> str:
        """What to do where this tap cannot go on."""
        run = self.parent.run.name
        return f"begin another: `streamrl tap {run} --name OTHER --from V`, at the run's nearest checkpoint at or below version V"

    def _past(self) -> PastLedger:
        return self.call(read_past(self.bus, self.subjects, self.parent.trainer.name))

    def _saved_state(self, path: Path) -> BranchState:
        try:
            return BranchState.decode(self.trainer.load(path))
        except CheckpointDamaged as error:
            raise CheckpointDamaged(error.message, hint=self._another, **error.values) from error

    def _first_state(self) -> tuple[BranchState, Path | None]:
        """Where a new tap begins, and the run's checkpoint that this is."""
        start = find_start(self._past(), self.run_dir.checkpoints, self.parent.trainer.name, self.settings.first)
        before = FoldState.decode(self.trainer.load(start.path)) if start.path else None
        return begin(self.rules, self.parent_rules, before), start.path

    def _stops(self, state: BranchState, stop: Callable[[], bool]) -> bool:
        parent = state.parent
        return stop() or is_over(self.config, parent)


def is_over(config: Config, parent: FoldState) -> bool:
    """Whether the run has trained its last version, by `run.steps`."""
    return not in_own_warmup(config, parent) and trained_steps(config, parent) >= config.run.steps


AHEAD = 512
"""Entries that are read ahead of the tap; it frees them as it trains."""


class FollowedLedger:
    """Reads a trainer's entries on the bus's loop; the training thread asks `at`. Satisfies `streamrl.consumers.training.steps.Entries`.

    A version that the parent trained again after a crash has the same batch, so that either entry serves.

    Args:
        log: the run's.
        loop: the bus's.
        subjects: of the run.
        trainer: whose ledger.
        after: the parent's state that the first entry follows; gaps up to its epoch are behind it.
        gaps: those that are known to lie ahead, by epoch; what they made void is not given.
        hint: what to do about one that comes and cannot be passed.
    """

    def __init__(
        self,
        log: Log,
        loop: asyncio.AbstractEventLoop,
        subjects: Subjects,
        trainer: str,
        *,
        after: FoldState,
        gaps: Mapping[int, LedgerEntry] = MappingProxyType({}),
        hint: str = "",
    ) -> None:
        self._log = log
        self._subject = subjects.ledger(trainer)
        self._done = after.version.number
        self._epoch = after.epochs[-1].epoch
        self._hint = hint
        self._gaps = dict(gaps)
        self._entries: dict[int, LedgerEntry] = {}
        self._given = self._done
        """The highest number whose entry was given away."""
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._task = asyncio.run_coroutine_threadsafe(self._follow(), loop)

    def at(self, number: int) -> LedgerEntry | None:
        """The entry that made version `number`, once it is there; those below are freed. Raises what reading raised."""
        if self._failure is not None and number not in self._entries:
            raise self._failure
        self._done = max(self._done, number - 1)
        with self._lock:
            for old in [n for n in self._entries if n < number]:
                del self._entries[old]
            entry = self._entries.get(number)
            self._given = number if entry is not None else self._given
        return entry

    def gaps(self) -> list[LedgerEntry]:
        """Entries of the gaps that there are, in the order of their epochs."""
        with self._lock:
            return [gap for _, gap in sorted(self._gaps.items())]

    def close(self) -> None:
        """Stop reading."""
        self._task.cancel()

    async def _room(self, number: int) -> None:
        # The other thread makes the room, and no asyncio.Event may be set from there.
        while number > self._done + AHEAD:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def _is_void(self, version: Version) -> bool:
        return any(version.epoch < epoch and version.number > gap.version.number for epoch, gap in self._gaps.items())

    def _take_gap(self, gap: LedgerEntry) -> None:
        """One that comes may be passed unless what it made void was given away, or what it follows is lost."""
        epoch, number = gap.version.epoch, gap.version.number
        if epoch <= self._epoch or epoch in self._gaps:
            return
        with self._lock:
            there = all(one in self._entries for one in range(max(self._given, self._done) + 1, number + 1))
            if self._given > number or not there:
                raise gap_in_the_way(gap, Version(self._epoch, self._done), self._hint)
            self._gaps[epoch] = gap
            for void in [one for one in self._entries if one > number]:
                del self._entries[void]

    async def _follow(self) -> None:
        try:
            first = (await self._log.state(LEDGER)).first
            async for message in self._log.read(LEDGER, after=first - 1, subject=self._subject):
                entry = decode(message.body, LedgerEntry, where=f"{self._subject} sequence {message.sequence}")
                if entry.gap is not msgspec.UNSET:
                    self._take_gap(entry)
                    continue
                if entry.version.epoch < self._epoch or self._is_void(entry.version):  # before a gap that is behind: done, or void
                    continue
                await self._room(entry.version.number)
                if entry.version.number > self._done:
                    with self._lock:
                        self._entries[entry.version.number] = entry
        except asyncio.CancelledError:
            raise
        except Exception as error:  # handed to the training thread, which raises it
            self._failure = error
