"""The evaluator worker: sets of problems asked while training goes on, after the warm-up, every so many versions, and at the end.

What is due is decided by the ledger and by the run's end, for each set by itself; when several evaluations of a set are due the
newest alone is done. A result is the event `evaluation`, one a set: `streamrl.producers.evaluation.results`. `final` says of the last
set's at the run's end that nothing is left to do.

Answers are stored as they come (`evaluations/<version>/<set>.jsonl` in the run directory), so that an evaluator that is killed asks for
those alone that are not there. Events are told after that; one that was told is not told again.

With engines of its own (`evaluation.engines`) the version is pinned while it is evaluated: they take it, and hold it until all problems
are answered, while the rollouts' engines move on. Without, the rollouts' engines answer at this version or later ones, with a part of their
slots (`evaluation.share`), and the result has the versions that did.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.bus.reading import stretch
from streamrl.config.evaluation_sets import HELDOUT, ProblemSet, problem_sets
from streamrl.data.problems import Problems, load_set
from streamrl.errors import LaunchError, LogTruncated
from streamrl.producers.engine_pool import EnginePool
from streamrl.producers.evaluation.asking import AHEAD, Counted, Room, asked_digest, evaluate
from streamrl.producers.evaluation.schedule import Schedule
from streamrl.producers.evaluation.store import SetStore, open_store
from streamrl.producers.factory import make_pool, make_runner, policy_tokenizer
from streamrl.producers.groups import GroupRunner
from streamrl.producers.slots import FREE, Cut, taken
from streamrl.runtime.run_end import read_end, watch_end
from streamrl.runtime.worker import farewell
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EVALUATION_ROLE, ROLLOUT_ROLE, RunEnd
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import EVENTS, LEDGER
from streamrl.schemas.versions import Version
from streamrl.telemetry.clock import REPORT_EVERY_S, StateClock
from streamrl.weights.pins import Pins

if TYPE_CHECKING:
    from streamrl.runtime.worker import Worker

logger = logging.getLogger(__name__)

EVALUATION = "evaluation"
_POLICY = "policy"
_BUSY_S = 1.0
_LOOKS = 5


async def main(worker: Worker) -> None:
    """Evaluate what falls due until the run's end has been evaluated or the worker drains."""
    config = worker.config
    tokenizer, _ = policy_tokenizer(worker)
    sets = problem_sets(config)
    rows = {one.name: await asyncio.to_thread(load_set, one, tokenizer) for one in sets}
    before = await _told(worker)
    schedules = {
        one.name: Schedule(every=one.every, warmup=config.warmup.max_steps > 0, done=before[one.name].number if one.name in before else -1)
        for one in sets
    }
    changed = asyncio.Event()
    pool = make_pool(worker, role=EVALUATION_ROLE if config.evaluation.engines else ROLLOUT_ROLE)
    suite = Suite(worker, pool, sets, rows)
    if config.evaluation.engines:
        # Names are of one living process each. What one that was killed has pinned would keep the engines there for the rest of its lease.
        await Pins(worker.bus.kv, _POLICY).release_all(worker.name)
    try:
        async with asyncio.TaskGroup() as group:
            following = await _follow(worker, list(schedules.values()), changed, group)
            background = [group.create_task(pool.run()), group.create_task(suite.report()), *following]
            work = group.create_task(_evaluate_all(worker, suite, schedules, before, changed))
            drain = group.create_task(worker.draining.wait())
            await asyncio.wait({work, drain}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*background, work, drain):
                task.cancel()
        async with farewell():
            await suite.tell()
    finally:
        await suite.close()


class Suite:
    """The sets of a run, and what asks them.

    Args:
        worker: the evaluator.
        pool: engines that answer; running.
        sets: in their order.
        rows: of each set by name.
    """

    def __init__(self, worker: Worker, pool: EnginePool, sets: tuple[ProblemSet, ...], rows: dict[str, Problems]) -> None:
        self.sets = sets
        self._worker = worker
        self._pool = pool
        self._rows = rows
        self._runners: dict[str, GroupRunner] = {}
        self._spent = Cut()
        self._counted: Counted = partial(taken, StateClock(FREE, slots=1), pool.found, self._spent)

    async def close(self) -> None:
        """End the processes that run user code."""
        for runner in self._runners.values():
            await runner.close()

    async def report(self) -> None:
        """Tell for ever what has been spent."""
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            await self.tell()

    async def tell(self) -> None:
        """Report the tokens that rollouts' engines have given."""
        tokens, _ = self._spent.take()
        if tokens and not self._worker.config.evaluation.engines:
            await self._worker.metrics({"tokens/evaluated_total": float(tokens)})

    async def evaluate(self, one: ProblemSet, version: Version) -> dict[str, Any]:
        """Ask a set at a version; the detail of its event, but for `final`."""
        worker, rows = self._worker, self._rows[one.name]
        runner = await self._runner(one)
        weights = f"{worker.config.run.name} {version}"
        path = worker.run_dir.evaluation_path(str(version), one.name)
        async with _held(worker, path, asked_digest(one, rows, weights)) as store:

            def told(done: int, of: int) -> None:
                worker.state = f"evaluates version {version.number} on {one.name}: {done} of {of}"

            told(len(store.found), min(one.num_problems, len(rows)))
            room = Room(self._most)
            pinned = worker.config.evaluation.engines > 0
            return await evaluate(one, rows, runner, store, version=version, room=room, pinned=pinned, counted=self._counted, told=told)

    def _most(self) -> float:
        """Samples to be asked for at once, by the slots that the engines have now."""
        evaluation = self._worker.config.evaluation
        slots = sum(presence.slots for presence in self._pool.engines.values())
        return slots * (AHEAD if evaluation.engines else evaluation.share)

    async def _runner(self, one: ProblemSet) -> GroupRunner:
        """That of a set, whose user code is loaded when it is asked first."""
        if one.name not in self._runners:
            function = one.config.producer.function
            runner = make_runner(self._worker, self._pool, function, key="producer.function", config=one.config)
            self._runners[one.name] = runner
            self._worker.trouble = lambda: next((notice for each in self._runners.values() if (notice := each.notice)), "")
            await runner.start()
        return self._runners[one.name]


@contextlib.asynccontextmanager
async def _held(worker: Worker, path: Path, asked: str) -> AsyncGenerator[SetStore]:
    """The records of a set, once nobody else has them."""
    while True:
        async with contextlib.AsyncExitStack() as stack:
            try:
                store = stack.enter_context(open_store(path, asked))
            except LaunchError:
                worker.state = f"waits for another process that evaluates here: {path}"
                await asyncio.sleep(_BUSY_S)
                continue
            yield store
            return


async def _follow(worker: Worker, schedules: list[Schedule], changed: asyncio.Event, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
    """Start to follow the ledger and the run's end; returns once the ledger's present entries have been seen."""
    bus, subjects = worker.bus, worker.subjects
    ledger = subjects.ledger(worker.config.trainer.name)
    newest = await bus.last(ledger)
    upto = newest.sequence if newest else 0
    caught_up = asyncio.Event()
    if not upto:
        caught_up.set()

    async def entries() -> None:
        first = (await bus.state(LEDGER)).first
        async for message in bus.read(LEDGER, after=first - 1, subject=ledger):
            entry = decode(message.body, LedgerEntry, where=f"ledger sequence {message.sequence}")
            if entry.gap is msgspec.UNSET:
                for schedule in schedules:
                    schedule.trained(entry.version.number, warm=entry.warm, epoch=entry.version.epoch)
            if message.sequence >= upto:
                caught_up.set()
                changed.set()

    def finish(number: int) -> None:
        for schedule in schedules:
            schedule.finish(number)

    trainer = worker.config.trainer.name
    ended, before = await read_end(bus, trainer), await _last_event(worker, EVALUATION)
    last_evaluated = before["version"] if before and before.get("final") else None
    # This evaluator died after the run's end and before its last evaluation; but an end that the ledger has gone past was a former one.
    made = None if newest is None else decode(newest.body, LedgerEntry, where="the ledger's end").version
    if ended is not None and ended.version == made and str(made) != last_evaluated and _still_over(worker, ended):
        finish(ended.version.number)

    async def end() -> None:
        async for end in watch_end(bus, trainer, after=0 if ended is None else ended.fence):
            finish(end.version.number)
            changed.set()

    tasks = [group.create_task(entries()), group.create_task(end())]
    await caught_up.wait()
    return tasks


def _still_over(worker: Worker, end: RunEnd) -> bool:
    """True where nothing follows the end that a trainer came to: `run.steps` may be raised, and another limit be gone by now."""
    limits = worker.config.run
    return end.steps >= limits.steps or (end.limit != "steps" and bool(limits.max_seconds or limits.until_reward))


async def _last_event(worker: Worker, kind: str) -> dict[str, Any] | None:
    message = await worker.bus.last(worker.subjects.events(kind))
    return None if message is None else decode(message.body, Event, where=f"the newest event {kind}").detail


async def _told(worker: Worker) -> dict[str, Version]:
    """By set, the newest version whose result was told; events of earlier builds are of the only set that there was."""
    found: dict[str, Version] = {}
    for _ in range(_LOOKS):  # events make room for newer ones, also while they are read
        try:
            state = await worker.bus.state(EVENTS)
            events = stretch(worker.bus, EVENTS, first=state.first, last=state.last, subject=worker.subjects.events(EVALUATION))
            async for message in events:
                detail = decode(message.body, Event, where=f"events sequence {message.sequence}").detail
                found[detail.get("set", HELDOUT)] = Version.parse(detail["version"])
            return found
        except LogTruncated:
            continue
    return found


async def _tell_result(worker: Worker, detail: dict[str, Any]) -> None:
    """Publish a set's event, once, whoever does it again within two minutes; raises BusError."""
    event = Event(kind=EVALUATION, worker=worker.name, detail=detail, time_s=time.time())
    name = f"{detail['set']}-{detail['version']}-{detail['final']}"
    await worker.bus.publish(worker.subjects.events(EVALUATION), encode(event), id=f"{EVALUATION}-{name}")


async def _evaluate_all(
    worker: Worker, suite: Suite, schedules: dict[str, Schedule], told: dict[str, Version], changed: asyncio.Event
) -> None:
    while True:
        changed.clear()
        due = [(one, *taken) for one in suite.sets if (taken := schedules[one.name].take()) is not None]
        if not due:
            worker.state = "waits for a version that is to be evaluated"
            await changed.wait()
            continue
        for number in sorted({number for _, number, _ in due}):
            version = schedules[due[0][0].name].version(number)
            async with _pinned(worker, version):
                for one, of, final in due:
                    last = final and one is due[-1][0]
                    if of != number or (told.get(one.name) == version and not last):
                        continue
                    detail = await suite.evaluate(one, version) | {"final": last}
                    await suite.tell()
                    logger.info("event=evaluated set=%s version=%s %s", one.name, detail["version"], _line(detail))
                    await _tell_result(worker, detail)
                    told[one.name] = version
        if due[-1][2]:
            return


def _line(detail: dict[str, Any]) -> str:
    return " ".join(f"{name}={detail[name]}" for name in ("accuracy", "num", "n", "failed", "truncated", "took_s", "final"))


@contextlib.asynccontextmanager
async def _pinned(worker: Worker, version: Version) -> AsyncGenerator[None]:
    """Have the engines for evaluations hold this version, if there are any; a worker that dies lets go of it after a while."""
    if not worker.config.evaluation.engines:
        yield
        return
    async with Pins(worker.bus.kv, _POLICY).held(version, worker.name, role=EVALUATION_ROLE):
        yield
