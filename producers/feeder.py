"""The feeder: turns grants into rollout tasks. It has no state of its own; the task stream's last sequence is its position.

```text
dataset row --plan--> RolloutTask i --expect_last = i--> stream `tasks` (sequence i + 1)
```

Two feeders fence each other: each publication demands that the stream ends where the plan begins, so of two the second is refused, reads
the position again and goes on from there. Nothing is issued twice and no index is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.bus.reading import read_key
from streamrl.config.data import data_sets, has_images
from streamrl.config.loss import estimator_of
from streamrl.config.tree import Config
from streamrl.core.seeds import run_seed, task_seed
from streamrl.data.mixed import Drawn, MixedRows, draw
from streamrl.data.problems import BROKEN, TOO_LONG, WITH_IMAGES, Problem, Problems, TaskRows, Unusable
from streamrl.data.streamed import Hope, open_task_rows, rows_digest
from streamrl.data.tokenizer import load_tokenizer
from streamrl.data.vocabulary import vocab_size
from streamrl.errors import BusError, ConfigError, Conflict, StreamFull
from streamrl.producers.curriculum import Curriculum
from streamrl.producers.mixture import first_segments, settled
from streamrl.producers.publishing import full_place
from streamrl.runtime.retries import pause_s
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import DataRecord, Grant, RunRecord
from streamrl.schemas.events import FULL_BLOBS, FULL_STREAM
from streamrl.schemas.images import image_blob, window_named, window_of
from streamrl.schemas.subjects import KEY_DATA, KEY_GRANTED, KEY_RUN, MAIN_SOURCE, TASKS, WARMUP_SOURCE, Subjects
from streamrl.schemas.tasks import Refused, RolloutTask, turn_sampling

if TYPE_CHECKING:
    from streamrl.runtime.worker import Worker

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256
"""Publications that are sent before the first answer is awaited; WITH_IMAGES where rows have images, which are held meanwhile."""
_FULL_FIRST_S = 0.25
_FULL_MAX_S = 5.0
_REPORT_EVERY_S = 2.0
_TOLD = 10
"""Rows of each reason that are named in the log; all of them are named in their tombstones."""
_REFUSED = {TOO_LONG: "feeder/row_too_long_total", BROKEN: "feeder/row_broken_total"}
"""Metrics by reason."""


class Plan(msgspec.Struct, frozen=True):
    """Tasks, and what has to be stored before them."""

    tasks: list[RolloutTask]
    blobs: dict[str, bytes]
    """The images that they name."""


def plan_tasks(grant: Grant, start: int, stop: int, problems: TaskRows | MixedRows, config: Config) -> list[RolloutTask]:
    """The tasks of a `plan`."""
    return plan(grant, start, stop, problems, config).tasks


def plan(grant: Grant, start: int, stop: int, problems: TaskRows | MixedRows, config: Config) -> Plan:
    """Tasks `start` to `stop` (or to the end of the grant), a function of its arguments alone. May read the rows from files.

    While the warm-up has no end yet, and below its end after that, a task belongs to the warm-up: one demonstration of its row, which
    needs no engine. Warm-up and what comes after it go through the rows from their own beginning. Of several sets the mixture that is on
    record says which a task takes (`streamrl.data.mixture`); the warm-up has that of version 0.
    """
    base = run_seed(config.run.name, config.run.seed)
    stop, end = min(stop, grant.granted), grant.granted if grant.warmup_end is None else grant.warmup_end
    warm, main = range(start, min(stop, end)), range(max(start, end), stop)
    first = first_segments(config) if config.data.sources else ()
    seed, shuffle = config.run.seed, config.data.shuffle
    drawn = draw(problems, warm, warmup=first, seed=seed, shuffle=shuffle)
    drawn += draw(problems, [index - end for index in main], warmup=(), seed=seed, shuffle=shuffle)
    tasks, blobs = list[RolloutTask](), dict[str, bytes]()
    for index, one in zip([*warm, *main], drawn, strict=True):
        task = _task(grant, index, base, one, config)
        if isinstance(one.problem, Problem) and (images := one.problem.images):
            ref, blobs[ref.name] = image_blob([each.data for each in images], window_of(index, _window(config)))
            task = replace(task, image_blob=ref, image_rows=tuple(each.image for each in images))
        tasks.append(task)
    return Plan(tasks, blobs)


def _window(config: Config) -> int:
    """Tasks that have one blob for rows with the same images: as many as may be issued at once."""
    return (config.tasks.max_staleness + 1) * config.tasks.batch_tasks


def min_version(grant: Grant, index: int, config: Config) -> int:
    """Lowest version number that may sample task `index` (`Grant.min_version`)."""
    return grant.min_version(index, batch_tasks=config.tasks.batch_tasks, max_staleness=config.tasks.max_staleness)


def _in_warmup(grant: Grant, index: int) -> bool:
    return grant.warmup_end is None or index < grant.warmup_end


def _task(grant: Grant, index: int, base: int, drawn: Drawn, config: Config) -> RolloutTask:
    warmup, problem = _in_warmup(grant, index), drawn.problem
    said = {"data_source": drawn.source} if drawn.source else {}
    bare = RolloutTask(
        run=config.run.name,
        index=index,
        source=WARMUP_SOURCE if warmup and config.run.kind == "rl" else MAIN_SOURCE,
        row=problem.row,
        data_epoch=drawn.epoch,
        metadata=said,
        num_rollouts=1 if warmup else config.group_size,
        greedy_baseline=True if estimator_of(config.loss).greedy and not warmup else msgspec.UNSET,
        sampling=config.sampling,
        min_version=0 if warmup else min_version(grant, index, config),
        min_epoch=msgspec.UNSET if warmup else grant.epoch,
        seed=task_seed(base, index),
    )
    if isinstance(problem, Unusable):
        return replace(bare, refused=Refused(problem.reason, problem.detail))
    return replace(
        bare,
        prompt_ids=problem.prompt_ids,
        prompt=problem.prompt,
        label=problem.label,
        tools=problem.tools,
        metadata={**problem.metadata, **said},
        chat_template_kwargs=problem.chat_template_kwargs,
        sampling=turn_sampling(config.sampling, problem.sampling) if problem.sampling else config.sampling,
        reward=problem.reward,
    )


class Feeder:
    """Issues what is granted on one bus until it is cancelled.

    Args:
        bus: connected.
        subjects: of the run.
        config: the whole tree.
        problems: the training rows.
    """

    def __init__(self, bus: Bus, subjects: Subjects, config: Config, problems: TaskRows | MixedRows) -> None:
        self.num_issued = 0
        self.refused: Counter[str] = Counter()
        """Tasks issued whose rows cannot be used, by reason."""
        self.num_full = 0
        """Times that a full stream refused a task."""
        self.curriculum = Curriculum(bus, subjects, config) if config.data.curriculum else None
        self.by_source: Counter[str] = Counter()
        """Tasks issued of each of several sources."""
        self.full = ""
        """FULL_STREAM or FULL_BLOBS, where a task or its images find no room just now."""
        self.state = "waits for the trainer's first grant"
        """What it does, for people."""
        self._bus = bus
        self._subjects = subjects
        self._config = config
        self._problems = problems
        self._hope = Hope(len(problems))
        self._at_once = WITH_IMAGES if has_images(config.data) else MAX_IN_FLIGHT
        self._stored: set[str] = set()
        """Blobs that tasks to come may name."""
        self._grant: Grant | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow the grants for ever. A full stream makes it wait and try again; any other BusError ends it."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                group.create_task(self._issue())
        finally:
            if self.curriculum is not None:
                await self.curriculum.close()

    async def _watch(self) -> None:
        async for entry in self._bus.kv.watch_key(KEY_GRANTED):
            if entry.value is None:
                continue
            grant = decode(entry.value, Grant, where=f"key {KEY_GRANTED}")
            if self._grant is None or grant.granted >= self._grant.granted:
                self._grant = grant
                self._changed.set()

    async def _issue(self) -> None:
        issued = (await self._bus.state(TASKS)).last
        refusals = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (grant := self._grant) is not None and issued < grant.granted:
                self.state = "running"
                rows = self._problems
                if isinstance(rows, MixedRows):
                    rows = await settled(self._bus, rows, self._config, grant, self.curriculum and self.curriculum.weights)
                planned = await asyncio.to_thread(plan, grant, issued, issued + self._at_once, rows, self._config)
                unstored = await self._store(planned)
                failure = unstored or await self._publish(planned.tasks)
                before, issued = issued, (await self._bus.state(TASKS)).last if failure else planned.tasks[-1].index + 1
                if isinstance(failure, StreamFull):
                    self._stall(failure, full_place(failure, FULL_BLOBS if unstored else FULL_STREAM))
                    refusals += 1
                    await asyncio.sleep(pause_s(refusals, first_s=_FULL_FIRST_S, most_s=_FULL_MAX_S))
                    continue
                if failure is not None and issued <= before:
                    raise failure
                if failure is not None:
                    logger.info("event=overtaken position=%d reason=another_feeder", issued)
                self._resume()
                refusals = 0
                self._look_at(planned.tasks)
            if self._grant is not None:
                self.state = f"waits for credit: {issued} tasks are issued"

    def _look_at(self, plan: Sequence[RolloutTask]) -> None:
        """Count and name the rows of issued tasks that cannot be used. Raises DataError when they are nearly all."""
        self.by_source.update(task.metadata["data_source"] for task in plan if self._config.data.sources)
        refused = [(task, task.refused) for task in plan if isinstance(task.refused, Refused)]
        for task, said in refused:
            if self.refused[said.reason] < _TOLD:
                logger.warning("event=%s task=%d row=%d detail=%s", said.reason, task.index, task.row, said.detail)
            self.refused[said.reason] += 1
        self._hope.tell(len(plan), [said for _, said in refused])

    async def _store(self, planned: Plan) -> StreamFull | None:
        """Store the images of tasks before them, once in a window; the failure, if there is no room."""
        first = planned.tasks[0].index
        self._stored = {name for name in self._stored if (window := window_named(name)) and window[1] >= first}
        for name, body in planned.blobs.items():
            if name not in self._stored:
                try:
                    await self._bus.sample_blobs.put(name, body)
                except StreamFull as error:
                    return error
                self._stored.add(name)
        return None

    async def _publish(self, plan: Sequence[RolloutTask]) -> BusError | None:
        """Publish tasks in order without waiting in between; the first failure, if any. What follows a failure is refused by the server."""
        publications = [
            self._bus.publish(self._subjects.tasks(task.source), encode(task), id=f"t{task.index}", expect_last=task.index) for task in plan
        ]
        results = await asyncio.gather(*publications, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        self.num_issued += len(results) - len(failures)
        for failure in failures:
            if not isinstance(failure, Conflict | StreamFull):
                raise failure
        return next((failure for failure in failures if isinstance(failure, BusError)), None)

    def _stall(self, failure: StreamFull, full: str) -> None:
        self.num_full += 1
        if not self.full:
            logger.warning("event=stalled reason=stream_full error=%s", failure.message)
        self.full = full

    def _resume(self) -> None:
        if self.full:
            self.full = ""
            logger.info("event=resumed")


async def check_dataset(bus: Bus, problems: TaskRows | MixedRows, config: Config) -> None:
    """Raise ConfigError unless the rows are those that the run record names; a run without a record passes."""
    record = await read_key(bus.kv, KEY_RUN, RunRecord)
    if record is None:
        return
    digest = problems.digest if isinstance(problems, Problems) else await asyncio.to_thread(rows_digest, config)
    num_rows = len(problems) if record.num_rows else 0
    if (record.dataset_digest, record.num_rows) != (digest, num_rows):
        raise _other_rows(config, f"{record.num_rows or 'the'} rows", record.dataset_digest, len(problems), digest)


async def settle_data(bus: Bus, problems: TaskRows | MixedRows, config: Config) -> None:
    """Keep what streamed rows were found to be under the key `data`, or raise ConfigError unless it is what is there."""
    if isinstance(problems, Problems):  # the run record has all of them
        return
    found = DataRecord(rows=len(problems), digest=problems.digest)
    known = await read_key(bus.kv, KEY_DATA, DataRecord)
    if known is None:
        try:
            await bus.kv.put(KEY_DATA, encode(found), expect=0)
            return
        except Conflict:
            known = await read_key(bus.kv, KEY_DATA, DataRecord)
    if known is not None and known != found:
        raise _other_rows(config, f"{known.rows} rows", known.digest, found.rows, found.digest)


def _other_rows(config: Config, expected: str, digest: str, num_rows: int, got: str) -> ConfigError:
    return ConfigError(
        f"expected {expected} that the run {config.run.name} was started with (digest {digest[:16]}), "
        f"got {num_rows} rows (digest {got[:16]}) in {', '.join(data.train for _, data in data_sets(config.data))}",
        hint="restore the file, or start a new run under another run.name",
        key="data.sources" if config.data.sources else "data.train",
    )


async def main(worker: Worker) -> None:
    """Open the dataset, check it against the run's, and issue tasks until the worker drains."""
    config, model = worker.config, worker.run_dir.policy_dir(worker.config)
    tokenizer = load_tokenizer(model)
    worker.state = "goes through the training rows"
    problems = await asyncio.to_thread(open_task_rows, config, tokenizer, worker.run_dir.data, vocab_size=vocab_size(model))
    await check_dataset(worker.bus, problems, config)
    feeder = Feeder(worker.bus, worker.subjects, config, problems)
    if config.data.sources:
        worker.detail = lambda: {"issued_by_source": dict(feeder.by_source)}
    if (curriculum := feeder.curriculum) is not None:
        worker.trouble = lambda: curriculum.error
    async with asyncio.TaskGroup() as group:
        group.create_task(settle_data(worker.bus, problems, config))
        running = group.create_task(feeder.run())
        group.create_task(_report(worker, feeder))
        await worker.draining.wait()
        running.cancel()


async def _report(worker: Worker, feeder: Feeder) -> None:
    """Publish metrics until the worker drains, and then the last ones; say when a full stream stalls it and when it goes on."""
    issued, full, stalled, last = 0, 0, "", False
    refused: Counter[str] = Counter()
    while not last:
        with contextlib.suppress(TimeoutError):
            last = await asyncio.wait_for(worker.draining.wait(), _REPORT_EVERY_S) is True
        worker.state = feeder.full or feeder.state
        if feeder.full != stalled:
            stalled = feeder.full
            await worker.event("stalled" if stalled else "resumed", {"reason": stalled})
        values = {"feeder/issued_total": feeder.num_issued - issued, "bus/full_total": feeder.num_full - full}
        values |= {name: feeder.refused[reason] - refused[reason] for reason, name in _REFUSED.items()}
        await worker.metrics(values)
        issued, full, refused = feeder.num_issued, feeder.num_full, feeder.refused.copy()
