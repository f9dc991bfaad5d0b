"""Standing runs: whether anything moves, and if nothing does, what the run waits for and what to do. Plain functions over numbers."""

from __future__ import annotations

import time

import msgspec
from msgspec.structs import replace

from streamrl.errors import SchemaError
from streamrl.monitor.numbers import RunNumbers, Standing, WorkerLine
from streamrl.runtime.worker import AGENTS_WAIT, ENGINES_FAIL, is_loading
from streamrl.schemas.events import FULL_BLOBS, FULL_SERVER, STANDING_EVENT, Event

STILL_S = 25.0
"""A run in which nothing has moved for this long has its wait named: with the delay of what it is seen by, within 30 s."""
LONG_S = 600.0
"""Where what it waits for is known to take long, a model that loads or a step, this long. So long, too, may the first task take to end
while engines make tokens."""
_PATIENCE = 4.0
"""Times the longest that this run has needed from one end of a task, or batch, to the next: while tokens are made it may need so long."""
_AWAY_S = 10.0
"""The bus is called away when it has not answered for so long."""
_SILENT_S = 10.0
_HUNG_SHARE = 0.25
"""Of the credits: where user code that hangs holds more, the run slows down, and it is said."""
_MOST_STEP_S = 2.5
"""Of the time between two looks, about a second, counts this much at most: while the looker was stopped, it saw nothing stand still."""


class Watch:
    """Says what a run waits for once nothing has moved for `STILL_S`; to be asked about once a second.

    It gets on when a task ends or a batch closes. Tokens alone are not that: an agent that asks without end makes them, too. They are
    worth patience, by what this run has needed so far.
    """

    def __init__(self) -> None:
        self._still_s = 0.0
        self._ended: tuple[object, ...] | None = None
        self._unended_s = 0.0
        self._longest_s = 0.0
        """Between two ends, so far."""
        self._ended_s = 0.0
        """Unix seconds of the last."""
        self._looked_s: float | None = None
        self._seen: tuple[object, ...] = ()
        self._moved_s = 0.0

    def look(self, numbers: RunNumbers, *, now_s: float, time_s: float, away_s: float) -> Standing | None:
        """None while it moves.

        Args:
            numbers: of this moment.
            now_s: on the monotonic clock.
            time_s: Unix seconds.
            away_s: since the bus has answered.
        """
        step_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _MOST_STEP_S)
        self._looked_s = now_s
        unended = self._unended(numbers, step_s=step_s, time_s=time_s)
        seen = progress_of(numbers)
        if seen != self._seen:
            self._seen, self._still_s, self._moved_s = seen, 0.0, time_s
            return unended
        self._still_s += step_s
        if self._still_s < STILL_S or numbers.phase == "finished":
            return unended
        found = diagnose(numbers, away_s=away_s)
        if found.normal and self._still_s < LONG_S:
            return None
        return replace(found, since_s=self._moved_s)

    def _unended(self, numbers: RunNumbers, *, step_s: float, time_s: float) -> Standing | None:
        """Say that nothing comes to an end, though much may be going on."""
        ended = (numbers.phase, numbers.version, numbers.tasks_ended)
        if ended != self._ended:
            # The first is that of the start, or of what was there when this looker came.
            if self._ended is not None and numbers.tasks_ended:
                self._longest_s = max(self._longest_s, self._unended_s)
            self._ended, self._unended_s, self._ended_s = ended, 0.0, time_s
        elif numbers.tasks_in_flight and numbers.phase != "finished":
            self._unended_s += step_s
        if self._unended_s < max(LONG_S, _PATIENCE * self._longest_s):
            return None
        return Standing(
            what="the end of a task: engines make tokens for those that producers hold, and none of them has ended",
            hint="does an agent ask without end? producer.max_calls and producer.max_tokens end it; `streamrl trace RUN TASK` shows one",
            since_s=self._ended_s,
        )


def loading(numbers: RunNumbers) -> tuple[str, ...]:
    """Workers that load a model while the run cannot go on without it: the trainer's, and engines while none of them serves a version."""
    names = [one.worker for one in numbers.workers if is_loading(one.state)]
    trainers = [name for name in names if name.startswith("trainer-")]
    engines = [name for name in names if name.startswith("engine-")]
    serving = any(not one.pinned and one.serving != "-" for one in numbers.engines)
    return (*trainers, *engines) if trainers or (not serving and numbers.loss is None) else ()


def progress_of(numbers: RunNumbers) -> tuple[object, ...]:
    """What changes when a run gets on."""
    return (
        numbers.phase,
        numbers.version,
        numbers.tasks_issued,
        numbers.tasks_ended,
        numbers.tasks_granted,
        numbers.tokens_made,
        numbers.stream_lag,
        numbers.swaps,
        tuple(engine.engine for engine in numbers.engines),
        numbers.ungraded,
    )


def diagnose(numbers: RunNumbers, *, away_s: float = 0.0) -> Standing:
    """Name what a run in which nothing moves waits for: the first that holds of what keeps others waiting, from the bus upwards.

    Whoever waits or fails has said why in its own state (`WorkerPresence.state`), which is repeated here; what nobody can say of itself is
    told from numbers.
    """
    if away_s > _AWAY_S:
        return Standing(
            cause="bus",
            what="the bus, which does not answer",
            hint="is nats-server up, is its disk full? bus/nats-server.log; workers wait bus.patience_s and are then restarted",
        )
    for find in (_worker, _room, _training, _engine, _rewards, _agents, _credit, _user_code):
        if (found := find(numbers)) is not None:
            return found
    return Standing(
        cause="unknown",
        what="something that no worker names",
        hint="`streamrl status` shows what each worker does; their logs are in logs/",
    )


def _worker(numbers: RunNumbers) -> Standing | None:
    for worker in numbers.workers:
        said = f": {worker.said}" if worker.said else ""
        if worker.state in ("waiting", "ended", "fenced"):
            paused = "another has taken over" if worker.state == "fenced" else "it is started again"
            return Standing(cause="ended", what=f"{worker.worker}, which has ended ({paused}){said}", hint=_log(worker.worker))
        if worker.silent_s > _SILENT_S and not is_loading(worker.state):
            return Standing(
                cause="silent",
                what=f"{worker.worker}, which is silent: it has been stopped, or its event loop is blocked",
                hint=f"after supervise.silent_s its stacks go to its log and it is restarted; {_log(worker.worker)}",
            )
        if said:
            what = f"{worker.worker}, which has just been started again and had ended{said}"
            return Standing(cause="ended", what=what, hint=_log(worker.worker))
    for worker in numbers.workers:
        if is_loading(worker.state) and not worker.worker.startswith("evaluator-"):
            return Standing(
                cause="loading", what=f"{worker.worker}, which is {worker.state.replace(':', '', 1)}", hint=_log(worker.worker), normal=True
            )
    return None


def _room(numbers: RunNumbers) -> Standing | None:
    full = [worker.worker for worker in numbers.workers if worker.state.startswith("stalled")]
    if not full and not numbers.stalled:
        return None
    if any(worker.state == FULL_SERVER for worker in numbers.workers):
        return Standing(
            cause="full_server",
            what=f"room on the bus's disk, for which {', '.join(full)} wait",
            hint="free room on the disk of the server's store, or raise its limit; budgets in [bus] that are larger than it do not help",
        )
    key = "bus.sample_blobs_bytes" if any(worker.state == FULL_BLOBS for worker in numbers.workers) else "bus.samples_bytes"
    return Standing(
        cause="full_stream",
        what=f"room on a full stream, for which {', '.join(full or numbers.stalled)} wait",
        hint=f"the trainer, or a tap that holds the stream, has to get on; or raise {key} and resume (docs/operations.md)",
    )


def _training(numbers: RunNumbers) -> Standing | None:
    trainers = _of_kind(numbers, "trainer")
    if not trainers:
        return Standing(cause="no_trainer", what="a trainer: none is there", hint=_log("trainer-0"))
    for trainer in trainers:
        if trainer.state.startswith(("trains", "ends")):
            return Standing(cause="step", what=f"{trainer.worker}, which {trainer.state}", hint=_log(trainer.worker), normal=True)
    return None


def _engine(numbers: RunNumbers) -> Standing | None:
    engines = [engine for engine in numbers.engines if not engine.pinned]
    found = _of_kind(numbers, "engine")
    if not engines:
        if numbers.untrained.publishing:
            return Standing(
                cause="publishing",
                what=f"version {numbers.untrained.publishing}, which trainer-0 is publishing",
                hint=f"weights.transport; does the bus take it? {_log('trainer-0')}",
            )
        does = "".join(f"; {worker.worker} {worker.state}" for worker in found)
        return Standing(
            cause="no_engine",
            what=f"an engine: none serves a version{does}",
            hint=_log("engine-0") if found else "engine.workers is 0: start one with `streamrl worker engine --run RUN`",
        )
    if failing := next((worker for worker in numbers.workers if worker.state.startswith(ENGINES_FAIL)), None):
        what = f"engines that answer {failing.worker}: {failing.state.removeprefix(ENGINES_FAIL).lstrip(': ')}"
        return Standing(cause="failing_engine", what=what, hint=_log("engine-0"))
    waiting, running = sum(engine.waiting for engine in engines), sum(engine.running for engine in engines)
    if waiting and not running:
        serving = ", ".join(sorted({engine.serving for engine in engines}))
        does = "".join(f"; {worker.worker} {worker.state}" for worker in found if worker.state.startswith("waits"))
        return Standing(
            cause="version",
            what=f"a version: {waiting} requests ask for a newer one than engines serve ({serving}); the newest is {numbers.version}{does}",
            hint=f"does the engine take weights? {_log('engine-0')} and logs/trainer-0.log",
        )
    return None


def _rewards(numbers: RunNumbers) -> Standing | None:
    if not numbers.ungraded:
        return None
    rewarders = _of_kind(numbers, "rewarder")
    if not rewarders:
        return Standing(
            cause="no_rewarder",
            what=f"a rewarder: {numbers.ungraded} groups wait for rewards, and none is there",
            hint="join one with `streamrl rewarder --run RUN`, or start the run again with reward.workers of 1 or more",
        )
    does = "; ".join(f"{worker.worker} {worker.state}" for worker in rewarders[:3])
    return Standing(
        cause="grading",
        what=f"rewards: {numbers.ungraded} groups wait for them; {does}",
        hint=f"does a grader hang? reward.timeout_s ends it; {_log(rewarders[0].worker)}",
    )


def _agents(numbers: RunNumbers) -> Standing | None:
    """Gateways whose agents do not come, where nobody else makes rollouts."""
    gateways = _of_kind(numbers, "gateway")
    idle = [worker for worker in gateways if worker.state.startswith(AGENTS_WAIT)]
    if not idle or len(idle) < len(gateways) or _of_kind(numbers, "producer"):
        return None
    return Standing(
        cause="agents",
        what=f"agents: {'; '.join(f'{one.worker}{one.state.removeprefix(AGENTS_WAIT)}' for one in idle[:3])}",
        hint="start agents that ask it, see docs/gateway.md: its address and its key are in the run's notes",
    )


def _credit(numbers: RunNumbers) -> Standing | None:
    if not (_of_kind(numbers, "producer") or _of_kind(numbers, "gateway")):
        return Standing(
            cause="no_producer", what="a producer: none is there", hint="set producer.workers, or join one with `streamrl attach`"
        )
    if numbers.tasks_issued < numbers.tasks_granted:
        does = "".join(f"; {worker.worker} {worker.state}" for worker in _of_kind(numbers, "feeder"))
        return Standing(
            cause="feeder",
            what=f"the feeder: {numbers.tasks_issued} of {numbers.tasks_granted} granted tasks are issued{does}",
            hint=_log("feeder-0"),
        )
    if numbers.tasks_in_flight:
        return None
    unended, told = numbers.tasks_issued - numbers.tasks_ended, numbers.untrained
    said = f"all {numbers.tasks_granted} granted tasks are issued, producers hold none, and {unended} of them have no end"
    if told.unrewarded:
        return Standing(
            cause="late_rewards",
            what=f"rewards: {told.unrewarded} groups are complete but for them; {said}",
            hint="do rewards come late, or never? reward.late_versions ends the wait",
        )
    if told.dead:
        return Standing(
            cause="dead_letters",
            what=f"samples that can be used: {told.dead} messages cannot ({told.newest_dead}); {said}",
            hint="`streamrl dead list RUN` has them: is a producer of another version, or with another tokenizer, attached?",
        )
    return Standing(cause="credit", what=f"credit: {said}", hint=f"are records lost? {_log('trainer-0')}")


def _user_code(numbers: RunNumbers) -> Standing | None:
    if any(engine.running for engine in numbers.engines):
        return Standing(cause="stuck_engine", what="engines, which have requests and make no tokens", hint=_log("engine-0"))
    hung = f"; {numbers.hung_tasks} have not for up to {numbers.hung_s:.0f} s" if numbers.hung_tasks else ""
    holder = "producer-0" if _of_kind(numbers, "producer") else "gateway-0"
    return Standing(
        cause="user_code",
        what=f"user code: producers hold {numbers.tasks_in_flight} tasks and ask no engine{hung}",
        hint=f"a tool or reward that hangs? {_log(holder)}",
    )


def credits_of(numbers: RunNumbers) -> int:
    """Tasks that may be open at once."""
    return numbers.tasks_granted - numbers.tasks_ended


def hung_line(numbers: RunNumbers) -> str:
    """That user code which hangs holds more than a quarter of the credits, with what to do; empty: it does not."""
    if numbers.phase == "finished" or numbers.hung_tasks <= _HUNG_SHARE * credits_of(numbers):
        return ""
    return (
        f"user code that has asked no engine for up to {numbers.hung_s:.0f} s holds {numbers.hung_tasks} of {credits_of(numbers)} credits. "
        "hint: a tool or reward that hangs? lower producer.idle_timeout_s, or raise tasks.max_staleness"
    )


def graders_line(numbers: RunNumbers) -> str:
    """How many graders hang, for how long, and how many were ended for it; empty: none hangs."""
    if numbers.phase == "finished" or not numbers.hung_graders:
        return ""
    ended = f"; {numbers.graders_ended} were ended early, as more hung than reward.max_hung" if numbers.graders_ended else ""
    return (
        f"calls of the reward that hang: {numbers.hung_graders}, for up to {numbers.hung_graders_s:.0f} s{ended}. "
        "hint: their rollouts end as timeout; the producers' logs name them"
    )


def _of_kind(numbers: RunNumbers, kind: str) -> list[WorkerLine]:
    return [worker for worker in numbers.workers if worker.worker.startswith(f"{kind}-") and worker.state != "done"]


def _log(worker: str) -> str:
    return f"see logs/{worker}.log in the run directory"


def standing_line(found: Standing) -> str:
    """A wait in one line, with what to do."""
    since = time.strftime("%H:%M:%S", time.localtime(found.since_s))
    if found.cause == "loading":
        return f"since {since} the run waits for {found.what}, as long as that takes; {found.hint}"
    return f"nothing moves since {since}; waits for {found.what}. hint: {found.hint}"


def standing_of(event: Event) -> Standing:
    """What a `standing` event says; raises SchemaError when it is none."""
    try:
        return msgspec.convert(event.detail, Standing)
    except msgspec.ValidationError as error:
        raise SchemaError(f"an event {STANDING_EVENT} of {event.worker} cannot be read: {error}") from error
