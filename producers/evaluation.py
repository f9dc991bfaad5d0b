"""The evaluator worker: held-out problems asked while training goes on, after the warm-up, every so many versions, and at the end.

What is due is decided by the ledger and by the event `finished`; when several evaluations are due the newest alone is done. A result is
the event `evaluation` with {version, versions: [oldest, newest that answered], accuracy, num, failed, final, problems}. `accuracy` is the
mean of the run's reward; `problems` are the first eight with {prompt, expected, got}.

With engines of its own (`evaluation.engines`) the version is pinned while it is evaluated: they take it, and hold it until all problems
are answered, while the rollouts' engines move on. Without, the rollouts' engines answer at this version or later ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.core.seeds import run_seed, task_seed
from streamrl.data.problems import Problem, load_heldout
from streamrl.errors import EngineError
from streamrl.producers.episode import Episode
from streamrl.producers.factory import make_pool, make_runner, policy_tokenizer
from streamrl.producers.groups import Group, GroupRunner
from streamrl.producers.protocol import Failure
from streamrl.producers.slots import FREE, Cut, taken
from streamrl.runtime.retries import pause_s
from streamrl.runtime.worker import farewell
from streamrl.schemas.codec import decode
from streamrl.schemas.control import EVALUATION_ROLE, ROLLOUT_ROLE
from streamrl.schemas.events import NUMERICS_EVENT, Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import EVENTS, LEDGER
from streamrl.schemas.tasks import RolloutTask, turn_sampling
from streamrl.schemas.versions import Version
from streamrl.telemetry.clock import StateClock
from streamrl.weights.pins import Pins

if TYPE_CHECKING:
    from streamrl.runtime.worker import Worker

logger = logging.getLogger(__name__)

Counted = Callable[[], contextlib.AbstractContextManager[object]]

EVALUATION = "evaluation"
FINISHED = "finished"
NUM_SHOWN = 8
_CONCURRENCY = 64
_ATTEMPTS = 5
_RETRY_S = 1.0
_MAX_RETRY_S = 30.0


class Schedule:
    """Which version is to be evaluated next; the newest that is due replaces older ones.

    Args:
        every: versions between evaluations, counted from the first; 0: the first and the last only.
        warmup: whether the first is the one that ends the warm-up; otherwise it is version 0.
        done: number of the newest version evaluated before, -1 for none.
    """

    def __init__(self, *, every: int, warmup: bool, done: int = -1) -> None:
        self._every = every
        self._first = None if warmup else 0
        self._done = done
        self._due = 0 if not warmup and done < 0 else -1
        self._last: int | None = None
        self._epochs: dict[int, int] = {}

    def version(self, number: int) -> Version:
        """The version of this number that was trained last."""
        return Version(self._epochs.get(number, 0), number)

    def trained(self, number: int, *, warm: bool, epoch: int = 0) -> None:
        """A version has been trained; called in order, from the first of the run."""
        self._epochs[number] = epoch
        if self._first is None and warm:
            self._first = number
            self._due = max(self._due, number)
        elif self._first is not None and self._every and (number - self._first) % self._every == 0:
            self._due = max(self._due, number)

    def finish(self, number: int) -> None:
        """The run has ended with this version."""
        self._last = number

    def take(self) -> tuple[int, bool] | None:
        """(version, whether it is the last), or None while nothing is due."""
        if self._last is not None:
            return self._last, True
        if self._due > self._done:
            self._done = self._due
            return self._due, False
        return None


async def main(worker: Worker) -> None:
    """Evaluate what falls due until the run's end has been evaluated or the worker drains."""
    config = worker.config
    tokenizer, _ = policy_tokenizer(worker)
    rows = await asyncio.to_thread(load_heldout, config.data, tokenizer)
    problems = rows.problems[: config.evaluation.num_problems]
    before = await _last_event(worker, EVALUATION)
    done = Version.parse(before["version"]).number if before else -1
    schedule = Schedule(every=config.evaluation.every, warmup=config.warmup.max_steps > 0, done=done)
    changed = asyncio.Event()
    pool = make_pool(worker, role=EVALUATION_ROLE if config.evaluation.engines else ROLLOUT_ROLE)
    runner = make_runner(worker, pool, config.producer.function, key="producer.function")
    spent = Cut()
    counted, told = partial(taken, StateClock(FREE, slots=_CONCURRENCY), pool.found, spent), partial(_tell, worker, spent)
    try:
        await runner.start()
        async with asyncio.TaskGroup() as group:
            following = await _follow(worker, schedule, changed, before, group)
            background = [group.create_task(pool.run()), *following]
            work = group.create_task(_evaluate_all(worker, runner, problems, schedule, changed, counted, told))
            drain = group.create_task(worker.draining.wait())
            await asyncio.wait({work, drain}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*background, work, drain):
                task.cancel()
        async with farewell():
            await told()
    finally:
        await runner.close()


async def _follow(
    worker: Worker, schedule: Schedule, changed: asyncio.Event, before: dict[str, Any] | None, group: asyncio.TaskGroup
) -> list[asyncio.Task[None]]:
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
                schedule.trained(entry.version.number, warm=entry.warm, epoch=entry.version.epoch)
            if message.sequence >= upto:
                caught_up.set()
                changed.set()

    # The position is taken before the newest event is looked at, so that none falls between the two.
    after = (await bus.state(EVENTS)).last
    ended = await _last_event(worker, FINISHED)
    last_evaluated = before["version"] if before and before.get("final") else None
    if ended is not None and newest is not None and ended["version"] != last_evaluated and await _still_over(worker, ended):
        # This evaluator died after the run's end and before its last evaluation; but an end that the ledger has gone past was a former one.
        entry = decode(newest.body, LedgerEntry, where="the ledger's end")
        if str(entry.version) == ended["version"]:
            schedule.finish(entry.version.number)

    async def end() -> None:
        async for message in bus.read(EVENTS, after=after, subject=subjects.events(FINISHED)):
            event = decode(message.body, Event, where=f"events sequence {message.sequence}")
            schedule.finish(Version.parse(event.detail["version"]).number)
            changed.set()

    tasks = [group.create_task(entries()), group.create_task(end())]
    await caught_up.wait()
    return tasks


async def _still_over(worker: Worker, ended: dict[str, Any]) -> bool:
    """Whether nothing follows the end that event `finished` tells of: `run.steps` may be raised, and another limit be gone by now."""
    limits = worker.config.run
    if ended.get("steps", 0) >= limits.steps:
        return True
    if not (limits.max_seconds or limits.until_reward):
        return False
    # It was another limit; but a trainer that has begun since then tells of its own end.
    events = [await worker.bus.last(worker.subjects.events(kind)) for kind in (FINISHED, NUMERICS_EVENT)]
    finished, began = (0 if event is None else event.sequence for event in events)
    return finished > began


async def _last_event(worker: Worker, kind: str) -> dict[str, Any] | None:
    message = await worker.bus.last(worker.subjects.events(kind))
    return None if message is None else decode(message.body, Event, where=f"the newest event {kind}").detail


async def _tell(worker: Worker, spent: Cut) -> None:
    """Report the tokens that rollouts' engines have given."""
    tokens, _ = spent.take()
    if tokens and not worker.config.evaluation.engines:
        await worker.metrics({"tokens/evaluated_total": float(tokens)})


async def _evaluate_all(
    worker: Worker,
    runner: GroupRunner,
    problems: tuple[Problem, ...],
    schedule: Schedule,
    changed: asyncio.Event,
    counted: Counted,
    told: Callable[[], Awaitable[None]],
) -> None:
    while True:
        changed.clear()
        due = schedule.take()
        if due is None:
            worker.state = "waits for a version that is to be evaluated"
            await changed.wait()
            continue
        number, final = due
        worker.state = f"evaluates version {number}"
        async with _pinned(worker, schedule.version(number)):
            detail = await evaluate(worker, runner, problems, number, counted=counted)
        await told()
        logger.info("event=evaluated version=%s accuracy=%.4f num=%d final=%s", detail["version"], detail["accuracy"], detail["num"], final)
        await worker.event(EVALUATION, {**detail, "final": final})
        if final:
            return


@contextlib.asynccontextmanager
async def _pinned(worker: Worker, version: Version) -> AsyncGenerator[None]:
    """Have the engines for evaluations hold this version, if there are any; a worker that dies lets go of it after a while."""
    if not worker.config.evaluation.engines:
        yield
        return
    async with Pins(worker.bus.kv, "policy").held(version, worker.name, role=EVALUATION_ROLE):
        yield


async def evaluate(
    worker: Worker, runner: GroupRunner, problems: tuple[Problem, ...], number: int, *, counted: Counted = contextlib.nullcontext
) -> dict[str, Any]:
    """Ask every problem once, at version `number` or later; returns the event's detail. Each is asked within a `counted()`."""
    room = asyncio.Semaphore(_CONCURRENCY)

    async def ask(index: int, problem: Problem) -> Group:
        async with room:
            with counted():
                return await _ask(runner, _task(worker, index, problem, number))

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(index, problem)) for index, problem in enumerate(problems)]
    groups = [one.result() for one in asked]
    answers = [answered.episodes[-1] if answered.episodes else None for answered in groups]
    versions = sorted(
        {span.version for answer in answers if answer for segment in answer.segments for span in segment.spans if span.version}
    )
    served = versions or [Version(0, number)]
    return {
        "version": str(Version(served[0].epoch, number)),
        "versions": [str(served[0]), str(served[-1])],
        "accuracy": sum(_reward(answer) for answer in answers) / len(answers),
        "num": len(answers),
        "failed": sum(answer is None for answer in answers),
        "problems": [
            {
                "prompt": _shown(problem.prompt),
                "expected": problem.label,
                "got": answer.completion if answer else "",
                "reward": _reward(answer),
            }
            for problem, answer in list(zip(problems, answers, strict=True))[:NUM_SHOWN]
        ],
    }


def _task(worker: Worker, index: int, problem: Problem, number: int) -> RolloutTask:
    config = worker.config
    sampling = turn_sampling(config.evaluation.sampling, problem.sampling)
    room = max(1, config.model.max_len - len(problem.prompt_ids))
    return RolloutTask(
        run=config.run.name,
        index=index,
        source=EVALUATION,
        row=problem.row,
        prompt_ids=problem.prompt_ids,
        prompt=problem.prompt,
        label=problem.label,
        tools=problem.tools,
        metadata=problem.metadata,
        chat_template_kwargs=problem.chat_template_kwargs,
        num_rollouts=1,
        sampling=msgspec.structs.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)),
        min_version=number,
        seed=task_seed(run_seed(config.run.name, config.run.seed), index),
    )


async def _ask(runner: GroupRunner, task: RolloutTask) -> Group:
    """One problem's answer; when an engine goes away another one is asked, a few times, and then the problem counts as not solved."""
    failure = Failure(0)
    for attempt in range(_ATTEMPTS):
        try:
            return await runner.run(task)
        except EngineError as error:
            logger.warning("event=problem_retried row=%d attempt=%d error=%s", task.row, attempt + 1, error.message)
            failure = Failure(0, "failed", error.message)
            await asyncio.sleep(pause_s(attempt + 1, first_s=_RETRY_S, most_s=_MAX_RETRY_S))
    return Group((), (failure,))


def _reward(answer: Episode | None) -> float:
    return 0.0 if answer is None or answer.reward is None else answer.reward


def _shown(prompt: Any) -> str:
    """A prompt as text: the string, or the last message's content."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return str(prompt[-1].get("content", ""))
    return str(prompt)
