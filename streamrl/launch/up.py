"""`streamrl up`: prepares a run, keeps it alive and shown, and ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import to_builtins

from streamrl.bus import connect
from streamrl.bus.protocol import Bus
from streamrl.config.secret_options import without_secrets
from streamrl.config.tree import Config
from streamrl.errors import BusError, LaunchError
from streamrl.launch.finished import finished_at
from streamrl.launch.local import LOGS_EVERY_S, LocalLauncher, worker_logs
from streamrl.launch.prepare import NothingBinds, check_log, check_start, open_record, prepare
from streamrl.launch.protocol import Launcher
from streamrl.launch.supervisor import Supervisor
from streamrl.monitor.failures import Pace
from streamrl.monitor.follow import Follower, read_totals
from streamrl.monitor.outcome import Outcome, conclude
from streamrl.monitor.run_state import RUNNING, RunState, write_state
from streamrl.monitor.screen import Display, one_line
from streamrl.monitor.status import read_summary
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import Watch, standing_line
from streamrl.runtime.bus_server import BusServer, run_bus_server
from streamrl.runtime.kinds import num_workers
from streamrl.runtime.lock import lock_run
from streamrl.runtime.run_record import continued
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import encode
from streamrl.schemas.control import RunRecord
from streamrl.schemas.events import FAILURES_EVENT, MOVING_EVENT, STANDING_EVENT, Event
from streamrl.schemas.subjects import Subjects
from streamrl.telemetry.logs import bound_logs, configure_logging
from streamrl.weights.factory import free_weights

if TYPE_CHECKING:
    from streamrl.bus.jetstream.bus import JetStreamBus

logger = logging.getLogger(__name__)

START_ORDER = ("trainer", "engine", "feeder", "producer", "evaluator")
"""Those that take longest to load come first; none needs another to be up."""
_TICK_S = 0.1
_SHOW_S = 0.4
_INTERRUPTED = 130
_BARREN_BATCHES = 8
"""Batches' worth of tasks that may end without a batch before that is worth a word."""


class Stops:
    """What the user has asked for: `drain` after the first signal, `now` after the second."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def ask(self) -> None:
        """One signal more."""
        (self.now if self.drain.is_set() else self.drain).set()

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Take SIGINT, SIGTERM and SIGHUP while open."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """What the user accepts."""

    gap: bool = False
    """A ledger that has lost more than its end."""
    code: bool = False
    """Code of the loss that has changed since the last start."""


async def up(config: Config, display: Display, *, launcher: Launcher | None = None, consent: Consent | None = None) -> Outcome:
    """Run `config` until it has finished, was stopped, or cannot go on. No process that it started outlives it.

    Args:
        config: checked.
        display: shows the run.
        launcher: starts the workers; None: the one that the configuration asks for.
        consent: None: nothing is accepted.

    Raises:
        CannotResume: something is lost that has to be accepted.
        LaunchError: the run is up already, or a worker cannot be kept running.
        ConfigError: dataset or configuration do not fit each other or the run that is resumed.
        BusError: the bus cannot be started or reached.
    """
    run = RunDir(Path(config.run.dir) / config.run.name)
    fresh = not run.path.exists()
    run.create()
    stops = Stops()

    def note(text: str) -> None:
        logger.info("event=note text=%s", text)
        display.note(text)

    with contextlib.ExitStack() as opened:
        opened.enter_context(lock_run(run))
        opened.enter_context(display)
        configure_logging(f"supervisor-{config.run.name}", file=run.events_path, stderr=False)
        config, settings = continued(config, run)
        for setting in settings:
            note(f"this run was begun before there was {setting.partition('=')[0]}: it goes on without, as with --set {setting}")
        config, secret_options = without_secrets(config)
        run.write_secret_options(secret_options)
        for section, options in secret_options.items():
            keys = ", ".join(f"{section}.options.{name}" for name in options)
            note(f"{keys}: kept in {run.options_path}, for it looks like a secret; the stored configuration is read by others")
        if launcher is None:
            launcher, config = opened.enter_context(_launcher(config, run, note))
        opened.enter_context(stops.listening())
        session = Session(config, run, display, stops, launcher, consent or Consent())
        body = asyncio.create_task(session.run_to_end())
        at_once = asyncio.create_task(stops.now.wait())
        await asyncio.wait((body, at_once), return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        killed = not body.done()
        if killed:
            # Cancelling makes the session's own clean-up kill what is left.
            body.cancel()
            await asyncio.gather(body, return_exceptions=True)
        if fresh and not session.prepared:
            # A start that came to nothing leaves nothing.
            shutil.rmtree(run.path, ignore_errors=True)
        if killed:
            display.note("stopped at once; `up` resumes from the last checkpoint")
            return Outcome(run=run, state="killed", exit_code=_INTERRUPTED)
        return body.result()


@contextlib.contextmanager
def _launcher(config: Config, run: RunDir, note: Callable[[str], None]) -> Generator[tuple[Launcher, Config]]:
    """Child processes, or with `ray.address` actors on a cluster; and the configuration that its workers are to have.

    Raises:
        LaunchError: Ray is not installed, there is no such cluster, or the run does not fit it.
    """
    if not config.ray.address:
        yield LocalLauncher(run, config), config
        return
    try:
        from streamrl.launch.ray import RayLauncher
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"ray.address is {config.ray.address}, but {error.name} cannot be imported",
            hint="pip install 'streamrl[ray]' on every node, or leave ray.address empty",
        ) from error
    launcher = RayLauncher.open(config, run, note)
    try:
        yield launcher, launcher.config
    finally:
        launcher.close()


class Session:
    """One `up` of a run, from its preparation to its summary."""

    def __init__(self, config: Config, run: RunDir, display: Display, stops: Stops, launcher: Launcher, consent: Consent) -> None:
        self._config = config
        self._run = run
        self._display = display
        self._stops = stops
        self._consent = consent
        self._supervisor = Supervisor(launcher, config.supervise, note=self._note)
        self._started_s = time.monotonic()
        self._unheard = False
        self._draining = False
        self._written: RunState | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self.prepared = False
        """Whether everything that can be known before the start was in order."""

    async def run_to_end(self) -> Outcome:
        """Everything `up` does between taking the lock and giving it back."""
        self._note(f"preparing run {self._run.name} in {self._run.path}")
        if not self._run.exists:
            # It may be that of a start that failed, or was killed, with other settings.
            shutil.rmtree(self._run.model_dir, ignore_errors=True)
        await check_start(self._config, self._run)
        record = await prepare(self._config, self._run, self._note)
        if self._stops.drain.is_set():
            return Outcome(run=self._run, state="stopped")
        self.prepared = True
        async with run_bus_server(self._config, self._run, self._note) as server:
            bus = await self._connect(server)
            try:
                try:
                    resumed, notes = await open_record(bus, self._config, self._run, record, accept_code=self._consent.code)
                except NothingBinds as first:
                    if self._config.bus.url:  # there the run may be somebody else's, whose trainer has not come to its first version
                        raise
                    self._note(f"nothing was trained yet, so the run begins anew: {first}")
                    bus, record = await self._begin_anew(bus, server)
                    resumed, notes = await open_record(bus, self._config, self._run, record, accept_code=True)
                self._run.write_config(self._config)
                self._note("resuming" if resumed else "starting")
                for text in [*notes, *await check_log(bus, self._config, self._run, accept_gap=self._consent.gap)]:
                    self._note(text)
                if resumed and (version := await finished_at(bus, self._config)) and (summary := read_summary(self._run)) is not None:
                    self._note(
                        f"nothing is left to do: the run has reached run.steps = {self._config.run.steps} with version {version}; "
                        f"train another with --name NAME, or a branch of it with `streamrl replay {self._run.name} --set ...`"
                    )
                    return Outcome(run=self._run, state="finished", summary=summary)
                return await self._follow(bus, server)
            finally:
                await bus.close()

    async def _connect(self, server: BusServer) -> JetStreamBus:
        return await connect(server.address, self._run.name, self._config.bus, name="supervisor")

    async def _begin_anew(self, bus: JetStreamBus, server: BusServer) -> tuple[JetStreamBus, RunRecord]:
        """Streams, keys and the built model of a run that has no version yet are made again."""
        await bus.remove()
        await bus.close()
        shutil.rmtree(self._run.model_dir, ignore_errors=True)
        record = await prepare(self._config, self._run, self._note)
        return await self._connect(server), record

    async def _follow(self, bus: Bus, server: BusServer) -> Outcome:
        view = RunView(
            self._run.name, steps=self._config.run.steps, warmup_steps=self._config.warmup.max_steps, before=await read_totals(bus)
        )
        async with Follower(bus, view, started_s=self._started_s, trainer=self._config.trainer.name, carry_totals=True) as follower:
            show = asyncio.create_task(self._show(bus, view, follower))
            bound = asyncio.create_task(self._bound_logs())
            try:
                state, failure = await self._supervise(view, server)
                if server.failure is None:
                    await self._catch_up(follower)
            finally:
                # After a drain nothing is left to kill; after a second Ctrl-C or an error, everything is.
                await self._supervisor.kill_all()
                free_weights(self._config.weights, self._run.name, self._run.path)
                background = (show, bound, *self._telling)
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
            self._write_state(state, len(view.reward_points), failure.message if failure is not None else "")
            outcome = await conclude(self._run, view, state=state, wall_s=follower.elapsed_s)
        if failure is not None:
            raise failure
        return outcome

    async def _supervise(self, view: RunView, server: BusServer) -> tuple[str, LaunchError | None]:
        """Start, watch and drain the workers; returns how it ended and, if it could not go on, why."""
        state, failure = "finished", None
        try:
            for kind in START_ORDER:
                for index in range(num_workers(self._config, kind)):
                    self._supervisor.start(kind, index)
            while not (view.finished or self._supervisor.over("trainer")):
                if self._stops.drain.is_set():
                    state = "stopped"
                    break
                self._supervisor.tick()
                server.check()
                self._check_failures(view)
                await asyncio.sleep(_TICK_S)
        except LaunchError as error:
            state, failure = "failed", error
            logger.error("event=gave_up error=%s", error.message)
        if server.failure is not None:
            # What drains, waits for the bus; nothing that it has to say would be heard.
            self._note("giving up: the bus is gone; stopping at once")
            await self._supervisor.kill_all()
            return state, failure
        self._note({"finished": "finished", "stopped": "draining; Ctrl-C again stops at once", "failed": "giving up; draining"}[state])
        self._draining = True
        await self._supervisor.drain(finish=("trainer", "evaluator") if state == "finished" else ())
        return state, failure

    def _check_failures(self, view: RunView) -> None:
        """Raise LaunchError once too many batches' worth of tasks have failed without one trained."""
        most = self._config.supervise.max_failed_batches * self._config.tasks.batch_tasks
        if not most or view.failures.num_tasks < most or 2 * view.failures.num_tasks < view.num_barren_tasks:
            return
        reasons = ", ".join(f"{reason} {count}" for reason, count in view.failures.reasons.most_common())
        raise LaunchError(
            f"{view.failures.num_tasks} tasks ({self._config.supervise.max_failed_batches} batches) have failed and none was trained "
            f"({reasons} rollouts); the newest: {view.failures.newest}",
            hint="mend the producer or the reward and run `up` again, which resumes; supervise.max_failed_batches is the limit, 0 for none",
        )

    async def _catch_up(self, follower: Follower) -> None:
        try:
            await follower.catch_up()
            await follower.store_totals()
        except BusError as error:
            # The summary then says what had been seen; an external bus that is gone must not hide why the run ended.
            self._note(f"the last numbers may be missing: {error.message}")

    async def _show(self, bus: Bus, view: RunView, follower: Follower) -> None:
        warned, told = False, 0
        watch, failures = Watch(), Pace()
        self._report(bus, MOVING_EVENT, {})  # what the session before may have said last
        while True:
            for text in view.notices[told:]:
                self._note(text)
            told = len(view.notices)
            numbers = view.numbers(elapsed_s=follower.elapsed_s, supervised=self._supervisor.lines())
            now_s = time.monotonic()
            found = watch.look(numbers, now_s=now_s, time_s=time.time(), away_s=now_s - follower.answered_s)
            found = None if self._draining else found
            if found != numbers.standing:
                view.standing = found
                self._note(standing_line(found) if found else "the run goes on")
                self._report(bus, STANDING_EVENT if found else MOVING_EVENT, to_builtins(found) if found else {})
            if numbers.failed_tasks and failures.due(now_s):
                counts = dict(view.failures.reasons)
                self._note(f"{numbers.failed_tasks} tasks have failed since the newest batch; the newest: {one_line(numbers.newest_error)}")
                self._report(bus, FAILURES_EVENT, {"tasks": numbers.failed_tasks, "rollouts": counts, "newest": numbers.newest_error})
            self._tell(partial(self._display.show, numbers))
            self._write_state(RUNNING, numbers.step)
            barren = numbers.barren_tasks >= _BARREN_BATCHES * self._config.tasks.batch_tasks
            if barren and not warned:
                self._note(
                    f"{numbers.barren_tasks} tasks have ended without giving a batch: are the rewards within each group all equal? "
                    "hint: easier problems, a longer warm-up, more rollouts a task, or tasks.drop_zero_variance = false"
                )
            warned = barren
            await asyncio.sleep(_SHOW_S)

    async def _bound_logs(self) -> None:
        """Workers' output goes straight to their files, so who opened these bounds them; on other nodes the actors do."""
        while not self._config.ray.address:
            await asyncio.sleep(LOGS_EVERY_S)
            await asyncio.to_thread(bound_logs, worker_logs(self._run))

    def _write_state(self, state: str, step: int, error: str = "") -> None:
        """For those who look at the run directory alone. A disk that is full must not end a run."""
        found = RunState(state=state, step=step, steps=self._config.run.steps, error=error)
        if found == self._written:
            return
        try:
            write_state(self._run, found)
        except OSError as failure:
            logger.warning("event=state_not_written error=%s", failure)
        self._written = found

    def _report(self, bus: Bus, kind: str, detail: dict[str, Any]) -> None:
        """Publish an event for those who look from outside; nothing waits for it, for the bus may be what is away."""
        event = Event(kind=kind, worker="supervisor", detail=detail, time_s=time.time())

        async def publish() -> None:
            try:
                await bus.publish(Subjects(self._run.name).events(kind), encode(event))
            except BusError as error:
                logger.warning("event=event_lost kind=%s error=%s", kind, error.message)

        task = asyncio.create_task(publish())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _note(self, text: str) -> None:
        logger.info("event=note text=%s", text)
        self._tell(partial(self._display.note, text))

    def _tell(self, say: Callable[[], None]) -> None:
        """Show something; once the terminal or the pipe's reader is gone, drain in silence."""
        if self._unheard:
            return
        try:
            say()
        except UnicodeError as error:  # a terminal that has not these letters: the next line may do
            logger.warning("event=not_shown error=%s", error)
        except OSError as error:
            self._unheard = True
            logger.warning("event=display_gone error=%s", error)
            if not self._stops.drain.is_set():
                self._stops.ask()
