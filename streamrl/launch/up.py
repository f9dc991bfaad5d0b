"""`streamrl up`: prepares a run, keeps it alive and shown, and ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamrl.bus import connect
from streamrl.bus.protocol import Bus
from streamrl.config.load import dump
from streamrl.config.secret_options import without_secrets
from streamrl.config.tree import Config
from streamrl.core.failed_share import window_of
from streamrl.errors import BusError, LaunchError
from streamrl.launch.kept_code import KeptCode
from streamrl.launch.local import LOGS_EVERY_S, LocalLauncher, worker_logs
from streamrl.launch.page import page_beside
from streamrl.launch.prepare import NothingBinds, check_inputs, check_log, check_start, has_trained, make_record, open_record
from streamrl.launch.protocol import Launcher
from streamrl.launch.remove import check_whole
from streamrl.launch.shown import Shown
from streamrl.launch.sinks import sinks_beside
from streamrl.launch.supervisor import Supervisor
from streamrl.monitor.accounting import devices_of
from streamrl.monitor.failed_share import Shares
from streamrl.monitor.failures import alone_to_blame
from streamrl.monitor.follow import Follower, read_totals
from streamrl.monitor.metrics_file import MetricsFile, written_version
from streamrl.monitor.outcome import Outcome, conclude, summed_up
from streamrl.monitor.row_writer import RowWriter
from streamrl.monitor.screen import Display
from streamrl.monitor.series import Series
from streamrl.monitor.summary import read_summary
from streamrl.monitor.view import RunView
from streamrl.runtime.bus_server import BusServer, run_bus_server
from streamrl.runtime.kinds import SINK_KIND, num_workers
from streamrl.runtime.lock import lock_run
from streamrl.runtime.run_end import finished_at
from streamrl.runtime.run_record import continued, with_decay_steps
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import RunRecord
from streamrl.telemetry.logs import bound_logs, configure_logging
from streamrl.weights.factory import free_weights

if TYPE_CHECKING:
    from streamrl.bus.jetstream.bus import JetStreamBus

logger = logging.getLogger(__name__)

START_ORDER = ("trainer", "engine", "feeder", "producer", "gateway", "rewarder", "evaluator")
"""Those that take longest to load come first; none needs another to be up."""
_TICK_S = 0.25
_FAILING_S = 3.0
"""Seconds for which no producer may do better before failures end a run: more than a worker's heartbeat of 2 s."""
_INTERRUPTED = 130
_DISK_EVERY_S = 2.0
_FULL_BYTES = 16 << 20
"""With less than that a disk counts as full: nats-server gives up a stream at the first write that fails, and checkpoints come and go."""
_UNSTORED = 2
"""Times in a row that the embedded bus stores nothing of what the supervisor gives it, for `bus.patience_s` each, before the run ends."""


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
    model: bool = False
    """Files of a model that have changed since the last start."""


async def up(
    config: Config, display: Display, *, launcher: Launcher | None = None, consent: Consent | None = None, page: bool = False
) -> Outcome:
    """Run `config` until it has finished, was stopped, or cannot go on. No process that it started outlives it.

    Args:
        config: checked.
        display: shows the run.
        launcher: starts the workers; None: the one that the configuration asks for.
        consent: None: nothing is accepted.
        page: serve its page beside it, unless `page.enabled` is false.

    Raises:
        CannotResume: something is lost that has to be accepted.
        LaunchError: the run is up already, its removal has begun, or a worker cannot be kept running.
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
        check_whole(run)
        session: Session | None = None

        def leave_nothing() -> None:
            """Of a start that came to nothing, whatever has ended it; still under the lock."""
            if fresh and (session is None or not session.prepared):
                shutil.rmtree(run.path, ignore_errors=True)

        opened.callback(leave_nothing)
        opened.enter_context(display)
        configure_logging(f"supervisor-{config.run.name}", file=run.events_path, stderr=False)
        config, settings = continued(config, run)
        for setting in settings:
            note(f"this run was begun before there was {setting.partition('=')[0]}: it goes on without, as with --set {setting}")
        if config.ray.address:  # its launcher hands out the configuration, and has to have it before the bus is there
            config, text = with_decay_steps(config, run, trained=True)
            if text:
                note(text)
        config, secret_options = without_secrets(config)
        run.write_secret_options(secret_options)
        for section, options in secret_options.items():
            keys = ", ".join(f"{section}.options.{name}" for name in options)
            note(f"{keys}: kept in {run.options_path}, for it looks like a secret; the stored configuration is read by others")
        if launcher is None:
            launcher, config = opened.enter_context(_launcher(config, run, note))
        opened.enter_context(stops.listening())
        session = Session(config, run, display, stops, launcher, consent or Consent(), page=page)
        body = asyncio.create_task(session.run_to_end())
        at_once = asyncio.create_task(stops.now.wait())
        await asyncio.wait((body, at_once), return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        killed = not body.done()
        if killed:
            # Cancelling makes the session's own clean-up kill what is left.
            body.cancel()
            await asyncio.gather(body, return_exceptions=True)
        if killed:
            display.note("stopped at once; `up` resumes from the last checkpoint")
            return session.killed()
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


class Disk:
    """The disk of a run: the embedded bus stops when it is full, and every worker waits for it then.

    Args:
        place: of the run's files.
    """

    def __init__(self, place: Path) -> None:
        self.full = False
        self._place = place
        self._due_s = 0.0
        self._was_full = False

    def check(self, now_s: float) -> None:
        """Look once in a while; raises LaunchError once two looks in a row have found it full."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + _DISK_EVERY_S
        free = free_bytes(self._place)
        self.full = self._was_full and free < _FULL_BYTES
        self._was_full = free < _FULL_BYTES
        if self.full:
            raise LaunchError(
                f"the disk is full: {free} bytes are free at {self._place}",
                hint="free some space there and run `up` again, which resumes",
                path=str(self._place),
            )


def free_bytes(place: Path) -> int:
    """Room on the disk of a directory that there is."""
    return shutil.disk_usage(place).free


class Session:
    """One `up` of a run, from its preparation to its summary."""

    def __init__(
        self, config: Config, run: RunDir, display: Display, stops: Stops, launcher: Launcher, consent: Consent, *, page: bool
    ) -> None:
        self._config = config
        self._run = run
        self._stops = stops
        self._consent = consent
        self._page = page and config.page.enabled
        self._shown = Shown(config, run, display, gone=stops.drain.set)
        self._note = self._shown.note
        self._supervisor = Supervisor(launcher, config.supervise, note=self._note)
        self._code = KeptCode(run)
        self._sinks = sinks_beside(config, run, self._note)
        self._started_s = time.monotonic()
        self.prepared = False
        """Whether everything that can be known before the start was in order."""
        self._follower: Follower | None = None
        self._disk = Disk(run.path)
        self._failing_since_s: float | None = None

    async def run_to_end(self) -> Outcome:
        """Everything `up` does between taking the lock and giving it back."""
        self._note(f"preparing run {self._run.name} in {self._run.path}")
        if not self._run.exists:
            # It may be that of a start that failed, or was killed, with other settings.
            shutil.rmtree(self._run.model_dir, ignore_errors=True)
        await check_start(self._config, self._run, self._note)
        inputs = await check_inputs(self._config, self._run, self._note)
        record = await make_record(self._config, self._run, inputs, self._note)
        if self._stops.drain.is_set():
            return summed_up(self._run, None, state="stopped")
        self.prepared = True
        async with run_bus_server(self._config, self._run, self._note) as server:
            bus = await self._connect(server)
            try:
                record = await self._with_schedule(bus, record)
                try:
                    resumed, notes = await self._open_record(bus, record, self._consent)
                except NothingBinds as first:
                    if self._config.bus.url:  # there the run may be somebody else's, whose trainer has not come to its first version
                        raise
                    self._note(f"nothing was trained yet, so the run begins anew: {first}")
                    bus, record = await self._begin_anew(bus, server)
                    resumed, notes = await self._open_record(bus, record, Consent(code=True, model=True))
                self._run.write_config(self._config)
                if why := await asyncio.to_thread(self._code.keep, self._config, record, inputs.modules):
                    self._note(why)
                self._note("resuming" if resumed else "starting")
                for text in [*notes, *await check_log(bus, self._config, self._run, accept_gap=self._consent.gap)]:
                    self._note(text)
                summary = read_summary(self._run.summary_path)
                if resumed and summary is not None and (version := await finished_at(bus, self._config)):
                    self._note(
                        f"nothing is left to do: the run has reached run.steps = {self._config.run.steps} with version {version}; "
                        "raise it to go on, train another with --name NAME, or a branch of it with "
                        f"`streamrl replay {self._run.name} --set ...`"
                    )
                    return Outcome(run=self._run, state="finished", summary=summary)
                return await self._follow(bus, server)
            finally:
                await bus.close()

    def killed(self) -> Outcome:
        """The outcome when it was cancelled; the plot is left as it was, for it takes a while."""
        view, wall_s = (None, 0.0) if self._follower is None else (self._follower.view, self._follower.elapsed_s)
        return summed_up(self._run, view, state="killed", wall_s=wall_s, exit_code=_INTERRUPTED)

    async def _with_schedule(self, bus: Bus, record: RunRecord) -> RunRecord:
        """Give the configuration, and the record that has it, the length of the learning rate's schedule."""
        # On a bus of others a run is not begun anew: see below.
        trained = bool(self._config.bus.url) or await has_trained(bus, self._config, self._run)
        self._config, text = with_decay_steps(self._config, self._run, trained=trained)
        if text:
            self._note(text)
        return msgspec.structs.replace(record, config=dump(self._config))

    async def _open_record(self, bus: Bus, record: RunRecord, consent: Consent) -> tuple[bool, list[str]]:
        return await open_record(bus, self._config, self._run, record, accept_code=consent.code, accept_model=consent.model)

    async def _connect(self, server: BusServer) -> JetStreamBus:
        if self._config.bus.url:  # it may be away, which takes a minute to find out
            self._note(f"connecting to {self._config.bus.url}")
        return await connect(server.address, self._run.name, self._config.bus, name="supervisor", gather=True)

    async def _begin_anew(self, bus: JetStreamBus, server: BusServer) -> tuple[JetStreamBus, RunRecord]:
        """Streams, keys and the built model of a run that has no version yet are made again."""
        await bus.remove()
        await bus.close()
        shutil.rmtree(self._run.model_dir, ignore_errors=True)
        inputs = await check_inputs(self._config, self._run, self._note)
        record = await make_record(self._config, self._run, inputs, self._note)
        return await self._connect(server), record

    async def _follow(self, bus: Bus, server: BusServer) -> Outcome:
        metrics = self._config.metrics
        series = Series(window_s=metrics.window_s, after=written_version(self._run.metrics))
        async with contextlib.AsyncExitStack() as opened:
            rows = opened.enter_context(contextlib.closing(RowWriter(MetricsFile(self._run.metrics, metrics))))
            if self._page:
                await opened.enter_async_context(page_beside(self._config, self._run, note=self._note, tell=self._shown.page).kept())
            return await self._follow_to_the_end(bus, server, series, rows)

    async def _follow_to_the_end(self, bus: Bus, server: BusServer, series: Series, rows: RowWriter) -> Outcome:
        view = RunView(
            self._run.name,
            steps=self._config.run.steps,
            warmup_steps=self._config.warmup.max_steps,
            before=await read_totals(bus),
            series=series,
            shares=Shares(window_of(self._config.tasks.batch_tasks, self._config.group_size)),
            devices=devices_of(self._config),
        )
        trainer = self._config.trainer.name
        async with Follower(bus, view, started_s=self._started_s, trainer=trainer, carry_totals=True, rows=rows) as follower:
            self._follower = follower
            show = asyncio.create_task(self._shown.follow(bus, view, follower, self._supervisor.lines))
            bound = asyncio.create_task(self._bound_logs())
            sinks = asyncio.create_task(self._sinks.keep_running())
            try:
                state, failure = await self._supervise(view, server)
                if server.failure is None and not self._disk.full:
                    await self._catch_up(follower)
                    await self._sinks.drain()
            finally:
                self._sinks.kill()
                # After a drain nothing is left to kill; after a second Ctrl-C or an error, everything is.
                await self._supervisor.kill_all()
                free_weights(self._config.weights, self._run.name, self._run.path)
                for task in (show, bound, sinks):
                    task.cancel()
                await asyncio.gather(show, bound, sinks, self._shown.close(), return_exceptions=True)
            self._shown.write_state(state, view, failure.message if failure is not None else "")
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
            while not view.finished:
                drained = self._supervisor.drained("trainer")
                if drained:
                    self._note(f"{drained} was told to drain by a signal that `up` has not sent: the run stops, and `up` resumes it")
                if drained or self._stops.drain.is_set():
                    state = "stopped"
                    break
                self._supervisor.tick()
                server.check()
                self._check_store(time.monotonic())
                self._check_failures(view)
                await asyncio.sleep(_TICK_S)
        except LaunchError as error:
            state, failure = "failed", error
            logger.error("event=gave_up error=%s", error.message)
        if server.failure is not None or self._disk.full:
            # What drains, waits for the bus; nothing that it has to say would be heard.
            self._note(f"giving up: {'nothing can be stored' if self._disk.full else 'the bus is gone'}; stopping at once")
            await self._supervisor.kill_all()
            return state, failure
        self._note({"finished": "finished", "stopped": "draining; Ctrl-C again stops at once", "failed": "giving up; draining"}[state])
        self._shown.draining = True
        await self._supervisor.drain(finish=("trainer", "evaluator") if state == "finished" else ())
        return state, failure

    def _check_store(self, now_s: float) -> None:
        """Raise LaunchError once nothing can be stored any more: a server whose disk was full keeps silent, also after there is room."""
        self._disk.check(now_s)
        unstored = [] if self._follower is None or self._config.bus.url else [*self._follower.unstored]
        if len(unstored) >= _UNSTORED:
            self._disk.full = True
            raise LaunchError(
                f"the bus stores nothing any more: {unstored[-1].message}",
                hint="was its disk full? see bus/nats-server.log in the run directory, free space and run `up` again, which resumes",
            )

    def _check_failures(self, view: RunView) -> None:
        """Raise LaunchError once too much fails and, for some seconds, no producer does any better."""
        self._drain_bad_producers(view)
        error = self._all_failed(view) or self._share_failed(view)
        now_s = time.monotonic()
        if error is None:
            self._failing_since_s = None
            return
        self._failing_since_s = self._failing_since_s or now_s
        if now_s - self._failing_since_s >= _FAILING_S:
            raise error

    def _all_failed(self, view: RunView) -> LaunchError | None:
        """Return the error of a run that trains nothing because its tasks fail, if it is one."""
        most = self._config.supervise.max_failed_batches * self._config.tasks.batch_tasks
        if not most or view.failures.num_tasks < most or 2 * view.failures.num_tasks < view.num_barren_tasks:
            return None
        if not alone_to_blame(view.failures.producers, view.working_producers, most=most):
            return None
        reasons = ", ".join(f"{reason} {count}" for reason, count in view.failures.reasons.most_common())
        return LaunchError(
            f"{view.failures.num_tasks} tasks ({self._config.supervise.max_failed_batches} batches) have failed and none was trained "
            f"({reasons} rollouts); the newest: {view.failures.newest}",
            hint="mend the producer or the reward, or filters.function, and run `up` again, which resumes; "
            "supervise.max_failed_batches is the limit, 0 for none",
        )

    def _drain_bad_producers(self, view: RunView) -> None:
        """Drain producers of which too much fails beside others."""
        limit, untrained = self._config.supervise.max_failed_share, view.untrained_rollouts(self._config.group_size)
        for name in sorted(view.shares.bad_beside_good(view.loaded_producers, limit, untrained=untrained)):
            share = view.shares.of(name)
            if self._supervisor.retire(name):
                self._note(
                    f"{name} is drained: {share.failed} of its last {share.ended} rollouts failed, and others' do not; see logs/{name}.log"
                )

    def _share_failed(self, view: RunView) -> LaunchError | None:
        """Return the error of a run in which too much fails for all producers, if it is one."""
        limit, untrained = self._config.supervise.max_failed_share, view.untrained_rollouts(self._config.group_size)
        if not view.shares.too_many(limit, untrained) or not view.shares.all_bad(view.loaded_producers, limit):
            return None
        failed, ended = view.shares.worst(untrained)
        return LaunchError(
            f"{failed} of the last {ended} rollouts failed, so the run trains on what is left; the newest: {view.failures.newest}",
            hint="mend the producer or the reward, and run `up` again, which resumes; supervise.max_failed_share is the limit",
            key="supervise.max_failed_share",
        )

    async def _catch_up(self, follower: Follower) -> None:
        try:
            await follower.catch_up()
            await follower.store_totals()
        except BusError as error:
            # The summary then says what had been seen; an external bus that is gone must not hide why the run ended.
            self._note(f"the last numbers may be missing: {error.message}")

    async def _bound_logs(self) -> None:
        """Output goes straight to files, so who opened these bounds them; those of workers under Ray their actors do."""
        ours = ("page-", SINK_KIND.format(kind="")) if self._config.ray.address else ("",)
        while True:
            await asyncio.sleep(LOGS_EVERY_S)
            if text := await asyncio.to_thread(self._code.take_changes):
                self._note(text)
            await asyncio.to_thread(bound_logs, [path for name in ours for path in worker_logs(self._run, name)])
