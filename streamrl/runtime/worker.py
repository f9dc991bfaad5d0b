"""Worker: what a service is given, and `run_worker`: the process around it (bus, signals, heartbeat, exit code)."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from streamrl.bus import BusAddress, connect
from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.errors import BusError, CannotResume, ConfigError, Fenced, StreamRLError, WeightsDiverged, no_room
from streamrl.runtime.beats import BEAT_S, Pulse
from streamrl.runtime.collection import collect_rarely, keep_none
from streamrl.runtime.kinds import USER_CODE, check_kind, load_main, num_workers, take_environment
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import STACKS_SIGNAL, SUPERVISOR_VARIABLE, Exit, die_with_parent
from streamrl.schemas.codec import encode
from streamrl.schemas.control import WorkerPresence
from streamrl.schemas.events import NOTICE_EVENT, Event
from streamrl.schemas.subjects import PREFIX_PRESENCE, Subjects
from streamrl.telemetry.clock import REPORT_EVERY_S, ClockReports, StateClock
from streamrl.telemetry.logs import configure_logging
from streamrl.telemetry.metrics import Histograms, MetricsSink

logger = logging.getLogger(__name__)

Main = Callable[["Worker"], Awaitable[None]]

LOADING = "loading"
"""State of a worker that has not begun its work; behind a colon it may say what it loads."""
ENGINES_FAIL = "waits for engines that fail"
"""The state of one begins with this whose every request fails at its engines."""
ENGINES_LEFT_OUT = "leaves out engines that fail"
"""It begins with this where others answer."""
WEIGHTS_FAIL = "waits for other weights"
"""The state of an engine begins with this which serves a version and could not take the newest."""
AGENTS_WAIT = "waits for agents"
"""The state of a gateway begins with this which no agent asks."""
PRESENCE_TTL_S = 6.0
_FAREWELL_S = 5.0
_HEARTBEAT_S = 2.0


def is_loading(state: str) -> bool:
    """Check if a worker in this state has not begun its work."""
    return state.partition(":")[0] == LOADING


def loading_model(config: Config) -> str:
    """The state of a worker that loads the run's model."""
    return f"{LOADING}: {Path(config.model.path).name or 'the built model'}"


class Worker:
    """What the `main` of a service gets. All attributes stay the same for the life of the process.

    Args:
        config: the whole tree; a service hands each component its own section.
        run_dir: the run's files.
        bus: connected; closed by the harness after `main`.
        kind: one of `streamrl.runtime.kinds.MAINS`.
        index: number within the kind.
        bus_url: where the bus is, without secrets; empty for one in process.
        pulse: of this process; None: nobody listens.
    """

    def __init__(
        self, *, config: Config, run_dir: RunDir, bus: Bus, kind: str, index: int, bus_url: str = "", pulse: Pulse | None = None
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.bus = bus
        self.kind = kind
        self.index = index
        self.bus_url = bus_url
        self.name = f"{kind}-{index}"
        self.subjects = Subjects(config.run.name)
        self.draining = asyncio.Event()
        """Set on the first SIGTERM or SIGINT: finish what must be finished, then return."""
        self._pulse = pulse or Pulse(None)
        self._state, self._since_s = LOADING, time.time()
        self.wait: Callable[[], str] = str
        """Asked with each heartbeat while `state` names no wait itself: what it waits for; empty: nothing."""
        self.trouble: Callable[[], str] = str
        """What people should know of it before what it does, such as a call of user code that blocks; empty: nothing."""
        self.detail: Callable[[], dict[str, Any]] = dict
        """Asked with each heartbeat: what else people may want to know of it."""
        self.gpus: float | None = None
        """Number of GPUs that it computes on, a trainer with all its ranks; 0: it is on the CPU. None: not known yet."""
        self._besides, self._besides_since_s = "", 0.0
        self._reports: ClockReports | None = None
        subject = self.subjects.metrics(self.name)
        self._sink = MetricsSink(self.name, lambda body: bus.publish(subject, body))

    @property
    def state(self) -> str:
        """What `streamrl status` shows until the worker drains: what it does, or `waits for ...`. May be set from any thread.

        It is `loading`, for which a worker may take long, until the service says otherwise or reports its first metrics. What follows a
        colon is detail: when that alone changes, it is still the same wait. `trouble` goes before it.
        """
        return self._trouble() or self._state

    @state.setter
    def state(self, state: str) -> None:
        if state.partition(":")[0] != self._state.partition(":")[0]:
            self._since_s = time.time()
        loaded = is_loading(state) != is_loading(self._state)
        self._state = state
        if loaded:
            self.beat()  # at once: one that hangs before its next would count as loading, for which there is an hour

    def beat(self) -> None:
        """Say to who has started this process that its loop turns."""
        self._pulse.beat(loading=is_loading(self._state))

    def _trouble(self) -> str:
        return "" if self._state.startswith((LOADING, "stalled")) else self.trouble()

    def _doing(self) -> tuple[str, float]:
        """What it does or waits for, and the Unix seconds since when."""
        besides = self._trouble() or ("" if self._state.startswith((LOADING, "stalled", "waits")) else self.wait())
        kind = besides.partition(":")[0]
        if kind != self._besides:
            self._besides, self._besides_since_s = kind, time.time()
        return (besides, self._besides_since_s) if besides else (self._state, self._since_s)

    async def metrics(self, values: Mapping[str, float], histograms: Histograms | None = None, *, tasks: Sequence[int] = ()) -> None:
        """Publish values whose names `streamrl.telemetry.names` declares (SchemaError otherwise); lost while the bus is away.

        `tasks`: what a producer has in hand.
        """
        if is_loading(self._state):
            self.state = "running"
        await self._sink.put(values, histograms, tasks)

    def timed(self, kind: str, clock: StateClock) -> None:
        """Have what `clock` counts reported from now on, as the states of a kind of worker; whether it is `loading` or not."""
        self._reports = ClockReports(clock, kind, self._sink.put, gpus=lambda: self.gpus)

    async def tell_times(self, *, left: bool = False) -> None:
        """Report what the worker's clock has counted, if it has one; `left`: for the last time, since it was told to end."""
        self._sink.left = left
        if self._reports is not None:
            await self._reports.report()

    async def event(self, kind: str, detail: dict[str, Any]) -> None:
        """Publish a lifecycle event for people; lost, and logged, while the bus is away."""
        event = Event(kind=kind, worker=self.name, detail=detail, time_s=time.time())
        try:
            await self.bus.publish(self.subjects.events(kind), encode(event))
        except BusError as error:
            logger.warning("event=event_lost kind=%s error=%s", kind, error.message)

    async def notice(self, text: str) -> None:
        """Tell people something that they should know: on the screen of `up`, and in the log."""
        logger.warning("event=notice text=%s", text)
        await self.event(NOTICE_EVENT, {"text": text})

    async def present(self) -> None:
        """Say on the bus that this worker is alive; raises BusError."""
        state, since_s = self._doing()
        if self.draining.is_set():
            state = "draining"
        presence = WorkerPresence(
            worker=self.name,
            kind=self.kind,
            state=state,
            pid=os.getpid(),
            host=socket.gethostname(),
            detail=self.detail(),
            since_s=since_s,
        )
        await self.bus.kv.put(f"{PREFIX_PRESENCE}workers/{self.name}", encode(presence), ttl_s=PRESENCE_TTL_S)


def run_worker(kind: str, run: RunDir, index: int | None = None, *, main: Main | None = None) -> int:
    """Run one worker in this process until it is over; returns the exit code (`Exit`).

    Args:
        kind: which worker.
        run: a prepared run directory.
        index: number within the kind; None takes the first that nobody has, above those the supervisor starts.
        main: run this instead of the kind's own entry point (attached producers).
    """
    supervisor = int(os.environ.pop(SUPERVISOR_VARIABLE, "0"))
    pulse = Pulse.of(os.environ)
    if supervisor:
        die_with_parent(supervisor)
    configure_logging(kind)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    collect_rarely()
    try:
        check_kind(kind)
        config = run.load_config()
        if kind in USER_CODE:
            config = run.with_secret_options(config)
        if not supervisor:
            take_environment(config, kind)
        drained = asyncio.run(_serve(kind, run, config, index, main or load_main(kind), supervisor, pulse))
    except SystemExit as error:  # with code 0 the process would end as if all were well
        return report_failure(left_by_code(error))
    except Exception as error:  # the one place of a worker process that catches everything
        return report_failure(error)
    finally:
        keep_none()
    return Exit.DRAINED if supervisor and drained else Exit.DONE


def left_by_code(error: SystemExit) -> ConfigError:
    """The error for code that has ended its worker's process by `sys.exit`, which names the line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigError(
        f"expected code that returns or raises, got sys.exit({error.code!r}) in {frame.filename}:{frame.lineno}, in {frame.name}",
        hint="raise an error that says what is wrong: code of a run must not end the worker that calls it",
        where=f"{frame.filename}:{frame.lineno}",
    )


def report_failure(error: Exception) -> Exit:
    """Say on stderr what went wrong and what to do about it, and choose the exit code. Unexpected errors come with their traceback."""
    cause = first_cause(error)
    cause = no_room(cause) or cause
    if not isinstance(cause, StreamRLError):
        logger.error("event=crashed error=%r", cause, exc_info=error)
        return Exit.FAILED
    logger.error("event=failed error=%s", type(cause).__name__)  # the sentence comes once, with its hint
    print(f"error: {cause}", file=sys.stderr, flush=True)
    match cause:
        case Fenced():
            return Exit.FENCED
        case ConfigError() | CannotResume():
            return Exit.CONFIG
        case WeightsDiverged():
            return Exit.DIVERGED
        case _:
            return Exit.FAILED


def first_cause(error: BaseException) -> BaseException:
    """The error to report: of a group, its first StreamRLError that decides an exit code, else its first member."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_cause(inner) for inner in error.exceptions]
    for kind in (Fenced, ConfigError, CannotResume, WeightsDiverged, StreamRLError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]


async def _serve(kind: str, run: RunDir, config: Config, index: int | None, main: Main, supervisor: int, pulse: Pulse) -> bool:
    """Run `main` beside what every worker does; returns whether it was told to drain."""
    async with connected(run, role=kind, name=kind) as bus:
        if index is None:
            index = await free_index(bus, kind, num_workers(config, kind))
        url = BusAddress.load(run.bus_path_of(kind)).url
        worker = Worker(config=config, run_dir=run, bus=bus, kind=kind, index=index, bus_url=url, pulse=pulse)
        # The supervisor has pointed stderr of its workers at their log files.
        configure_logging(worker.name, file=None if supervisor else run.log_path(worker.name))
        drain_on_signals(worker.draining)
        await worker.present()
        tasks = (_heartbeat(worker), _beat(worker), _tell_times(worker))
        hearts = [asyncio.create_task(task) for task in tasks]
        logger.info("event=started run=%s worker=%s pid=%d", run.name, worker.name, os.getpid())
        try:
            await main(worker)
        finally:
            for heart in hearts:
                heart.cancel()
            await asyncio.gather(*hearts, return_exceptions=True)
        # Where the bus is gone as well, the key lapses by itself.
        async with farewell():
            await worker.tell_times(left=worker.draining.is_set())
            await bus.kv.delete(f"{PREFIX_PRESENCE}workers/{worker.name}")
        drained = worker.draining.is_set()
        logger.info("event=ended worker=%s drained=%s", worker.name, drained)
    return drained


@contextlib.asynccontextmanager
async def farewell() -> AsyncGenerator[None]:
    """What a worker says last: given up after some seconds, for a bus that is gone keeps nobody from ending."""
    with contextlib.suppress(BusError, TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            yield


@contextlib.asynccontextmanager
async def connected(
    run: RunDir, *, role: str = "", name: str = "", patience_s: float | None = None, gather: bool = False
) -> AsyncGenerator[Bus]:
    """The bus of a prepared run, closed at the end.

    Args:
        run: which run.
        role: whose rights are enough (`streamrl.bus.permissions.ROLES`); empty: the operator's, who also makes missing streams.
        name: shown in the server's monitoring.
        patience_s: how long the first connection is tried; bus.patience_s if None.
        gather: see `streamrl.bus.connect`.

    Raises:
        ConfigError: the run has no address yet.
        BusUnavailable: its bus does not answer.
    """
    path = run.bus_path_of(role) if role else run.bus_path
    address, config = BusAddress.load(path), run.load_config().bus
    bus = await connect(address, run.name, config, create=path == run.bus_path, name=name, patience_s=patience_s, gather=gather)
    try:
        yield bus
    finally:
        await bus.close()


async def free_index(bus: Bus, kind: str, first: int) -> int:
    """The lowest index from `first` on that no live worker of `kind` has."""
    prefix = f"{PREFIX_PRESENCE}workers/{kind}-"
    taken = {key.removeprefix(prefix) for key in await bus.kv.keys(prefix)}
    index = first
    while str(index) in taken:
        index += 1
    return index


def drain_on_signals(draining: asyncio.Event) -> None:
    """Have the first SIGTERM or SIGINT set `draining` and the second end the process at once, until this process has ended.

    Plain handlers, not the loop's: they also run while the loop is busy with a long computation. They stay when the loop is closed: a
    worker that is told to stop in its last moments ends as it would have.
    """
    loop = asyncio.get_running_loop()
    asked = False

    def drain(number: int) -> None:
        logger.info("event=draining signal=%s", signal.Signals(number).name)
        draining.set()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        asked = True
        if not loop.is_closed():
            loop.call_soon_threadsafe(drain, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


async def _beat(worker: Worker) -> None:
    """Apart from the presence, which waits for the bus."""
    while True:
        worker.beat()
        await asyncio.sleep(BEAT_S)


async def _tell_times(worker: Worker) -> None:
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        await worker.tell_times()


async def _heartbeat(worker: Worker) -> None:
    while True:
        await asyncio.sleep(_HEARTBEAT_S)
        try:
            await worker.present()
        except BusError as error:
            logger.warning("event=heartbeat_lost worker=%s error=%s", worker.name, error.message)
