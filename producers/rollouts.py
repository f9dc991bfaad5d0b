"""The producer worker: claims tasks, has them rolled out and scored, publishes the samples, and only then takes the task off the queue.

`main` is the worker that the run starts; `attach` joins a running loop with another producer function and leaves it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from streamrl.bus.reading import read_key
from streamrl.config.bridges import bridge_of, function_of
from streamrl.config.code import code_digests, judging_code
from streamrl.config.recording import recording_of
from streamrl.core.failed_share import LEAST_ROLLOUTS, FailedShare, window_of
from streamrl.core.lengths import histogram
from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.attempts import Attempts
from streamrl.producers.candidates import store_candidates
from streamrl.producers.checkpoints import RolloutCheckpoints
from streamrl.producers.children.jobs import Keeping
from streamrl.producers.claims import Claims, Demand
from streamrl.producers.demonstrations import demonstration
from streamrl.producers.episode import samples_of
from streamrl.producers.factory import make_pool, make_runner, policy_tokenizer
from streamrl.producers.grading import ask_for_rewards
from streamrl.producers.images import TaskImages
from streamrl.producers.protocol import Claim, Failure, Producer
from streamrl.producers.publishing import Publisher
from streamrl.producers.routing import store_experts
from streamrl.producers.slots import FREE, Cut, phase, stored, taken
from streamrl.runtime.collection import keep_all
from streamrl.runtime.run_end import read_fence, watch_end
from streamrl.runtime.worker import farewell
from streamrl.schemas import encoding
from streamrl.schemas.control import RunRecord
from streamrl.schemas.subjects import KEY_RUN, MAIN_SOURCE, WARMUP_SOURCE
from streamrl.schemas.tasks import RolloutTask
from streamrl.telemetry.clock import StateClock

if TYPE_CHECKING:
    from streamrl.producers.groups import Group, GroupRunner
    from streamrl.runtime.worker import Worker

logger = logging.getLogger(__name__)

Work = Callable[[RolloutTask, Claim], Awaitable[None]]

_WARMUP_CONCURRENCY = 256
"""Demonstrations ask no engine; this many keep the bus busy."""
_REPORT_EVERY_S = 2.0
_TASKS_SHOWN = 256
"""Claimed tasks that its presence names."""
_LEAVES_AFTER = 64
"""Tasks in a row that an attached producer's code fails before it leaves, and"""
_FAILED = ("failed", "timeout", "deliveries")
_LEAVES_AFTER_S = 30.0
"""the seconds for which it has done nothing else."""


class Streak:
    """Counts what an attached producer's own code fails: tasks in a row, and a part of all rollouts. What engines fail does not count.

    Args:
        most: rollouts that the part is taken over.
        limit: greatest part that may fail.
    """

    def __init__(self, most: int = LEAST_ROLLOUTS, limit: float = 1.0) -> None:
        self.share = FailedShare(most)
        self.length = 0
        self.newest = ""
        """Error."""
        self.hopeless = False
        """Whether it was long once, in tasks and in time, or the part too great."""
        self._limit = limit
        self._since_s = 0.0

    @property
    def said(self) -> str:
        """The failures in words."""
        if self.length >= _LEAVES_AFTER:
            return f"{_LEAVES_AFTER} tasks in a row and more"
        return f"{self.share.failed} of the last {self.share.ended} rollouts"

    def tell(self, group: Group) -> None:
        """A task has ended."""
        wrong = [one for one in group.failures if one.reason in _FAILED and not one.detail.startswith("engine: ")]
        self.share.add(failed=len(wrong), ended=len(wrong) + len({episode.rollout for episode in group.episodes}))
        self.hopeless |= self.share.is_full and self.share.exceeds(self._limit)
        failed = [one.detail for one in wrong if one.reason == "failed"]
        self.newest = failed[-1] if failed else self.newest
        if group.episodes or not failed:
            self.length = 0
            return
        self._since_s = self._since_s if self.length else time.monotonic()
        self.length += 1
        self.hopeless |= self.length >= _LEAVES_AFTER and time.monotonic() - self._since_s >= _LEAVES_AFTER_S


class Front(Producer, Demand, Protocol):
    """A producer in this process that claims tasks for those who ask it for some (`streamrl.producers.gateway`)."""

    def doing(self) -> str:
        """What people see of it."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What has happened since the last call."""
        ...


async def main(worker: Worker) -> None:
    """Serve the run's tasks with `producer.function`, and its warm-up, until the worker drains."""
    if (bridge := bridge_of(worker.config.producer.function)) and bridge.play:
        await function_of(bridge.play)(worker)
        return
    sources = (MAIN_SOURCE, WARMUP_SOURCE) if worker.config.warmup.max_steps else (MAIN_SOURCE,)
    await serve(worker, worker.config.producer.function, sources=sources)


async def attach(worker: Worker, function: str, *, source: str = MAIN_SOURCE) -> int:
    """Join a running loop as one more producer; stay until the worker drains or the run has finished.

    Tasks that are open then go back to the queue.

    Args:
        worker: connected to the run, with a name of its own.
        function: `single_turn`, `file.py:name`, `pkg.mod:name` or `pkg.mod.name`.
        source: whose tasks it takes.

    Returns:
        Number of tasks it finished.

    Raises:
        ConfigError: `function` cannot be found or is no producer, or fails one task after the other, which takes the rows from the others.
    """
    leaver = asyncio.create_task(leave_when_finished(worker))
    config = worker.config
    streak = Streak(window_of(config.tasks.batch_tasks, config.group_size), config.supervise.max_failed_share)
    try:
        done = await serve(worker, function, sources=(source,), streak=streak)
        if streak.hopeless:
            raise ConfigError(
                f"{streak.said} have failed in the producer's own code; the newest: {streak.newest}",
                hint=f"mend {function} and attach again; what it failed is dropped for this pass over the data",
                key=function,
            )
        return done
    finally:
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)


async def check_reward(worker: Worker) -> None:
    """Raise ConfigError where this host's code of the reward, or of the filter, is not what the run was last started with."""
    mine = judging_code(worker.config)
    record = await read_key(worker.bus.kv, KEY_RUN, RunRecord)
    if not mine or record is None or not record.code:
        return
    digests = code_digests(mine)
    for key, name in mine.items():
        wanted, found = record.code.get(key), digests.get(key)
        if wanted is not None and wanted != found:
            raise ConfigError(
                f"expected the {'reward' if key == 'reward.kind' else 'filter'} that run {record.run} was started with "
                f"(digest {wanted[:16]}), got {name} (digest {(found or 'none')[:16]})",
                hint="copy the run's file, and those beside it that it imports",
                key=key,
            )


async def leave_when_finished(worker: Worker) -> None:
    """Have the worker drain once the run has finished."""
    trainer = worker.config.trainer.name
    async for _ in watch_end(worker.bus, trainer, after=await read_fence(worker.bus, trainer)):
        logger.info("event=run_finished action=leave")
        worker.draining.set()
        return


async def serve(
    worker: Worker, function: str, *, sources: Sequence[str], streak: Streak | None = None, front: Front | None = None, concurrency: int = 0
) -> int:
    """Claim and work on the tasks of `sources` until the worker drains; returns how many were finished.

    Args:
        worker: this one.
        function: the producer.
        sources: of tasks.
        streak: a hopeless one drains the worker.
        front: the producer instead of `function`. Its slots wait for agents, so their time is not told as a producer's.
        concurrency: tasks in flight; 0: producer.concurrency.
    """
    concurrency = concurrency or worker.config.producer.concurrency
    clock = StateClock("setup", slots=concurrency)
    if front is None:
        worker.timed("producer", clock)
    pool = make_pool(worker)
    cut = Cut()
    work = partial(_in_slot, clock, pool.found, cut)
    scores = not worker.config.reward.workers
    runner = make_runner(worker, pool, function, key="producer.function", producer=front, scores=scores, filters=True)
    publisher = Publisher(worker.bus, worker.subjects, producer=worker.name)
    claims = [_claims(worker, source, runner, publisher, work, streak, front, concurrency) for source in sources]
    besides = worker.detail
    worker.detail = lambda: {**besides(), "tasks": _in_hand(claims)}
    if front is not None:
        worker.wait = lambda: pool.wait or front.doing()
    report = partial(_report, worker, runner, claims, publisher, cut, front)
    keep_all()
    try:
        await runner.start()
        # A worker that stands still with claims in its hands may lose them.
        await asyncio.to_thread(encoding.load)
        clock.move("setup", FREE, slots=clock.slots)
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(pool.run()), group.create_task(_keep_reporting(worker, publisher, report))]
            await asyncio.wait([group.create_task(claim.run(worker.draining)) for claim in claims])
            for task in background:
                task.cancel()
        async with farewell():
            await report()
    finally:
        await runner.close()
    return sum(claim.num_done for claim in claims)


def _claims(
    worker: Worker,
    source: str,
    runner: GroupRunner,
    publisher: Publisher,
    in_slot: Callable[[Work], Work],
    streak: Streak | None,
    front: Front | None,
    concurrency: int,
) -> Claims:
    config = worker.config
    warmup = source == WARMUP_SOURCE or config.run.kind == "sft"
    kept = RolloutCheckpoints(worker.bus), Attempts(worker.bus)
    work = _demonstrate(worker, publisher) if warmup else in_slot(_roll_out(worker, runner, publisher, *kept, streak))

    async def let_go(task: int, ended: bool) -> None:
        for one in kept:
            if ended:
                await one.forget(task)
            else:
                one.drop(task)

    return Claims(
        worker.bus,
        publisher,
        source,
        work,
        concurrency=_WARMUP_CONCURRENCY if warmup else concurrency,
        ack_wait_s=config.bus.ack_wait_s,
        let_go=None if warmup else let_go,
        demand=None if warmup else front,
    )


def _roll_out(
    worker: Worker, runner: GroupRunner, publisher: Publisher, checkpoints: RolloutCheckpoints, attempts: Attempts, streak: Streak | None
) -> Work:
    async def work(task: RolloutTask, claim: Claim) -> None:
        again = claim.deliveries > 1
        if not again:
            checkpoints.begin(task.index)
            attempts.begin(task.index)
        keeping = Keeping(
            resumes=await checkpoints.load(task.index) if again else {},
            store=partial(checkpoints.save, task.index),
            attempts=await attempts.load(task.index) if again else 0,
            died=partial(attempts.add, task.index),
            images=TaskImages(worker.bus.sample_blobs, task) if task.images else None,
        )
        group = await runner.run(task, keeping=keeping)
        samples = samples_of(task, group.episodes, producer=worker.name, more=claim.told)
        with phase("publish"):
            if worker.config.trainer.routing_replay:
                samples = await store_experts(publisher, samples, group.episodes)
            if recording_of(worker.config).anything:
                samples = await store_candidates(publisher, samples, group.episodes)
            failures = group.failures
            if worker.config.reward.workers:
                samples, unasked = await ask_for_rewards(publisher, task, group.episodes, samples)
                failures = (*failures, *unasked)
            rollouts = await publisher.task(task, samples, failures, claim)
        lying = [episode for episode in group.episodes if episode.rollout in rollouts]
        stored([length for episode in lying for length in episode.num_sampled])
        if streak is not None:
            streak.tell(group)
            if streak.hopeless:
                worker.draining.set()

    return work


def _in_slot(clock: StateClock, found: Callable[[], Awaitable[None]], cut: Cut, work: Work) -> Work:
    async def timed(task: RolloutTask, claim: Claim) -> None:
        with taken(clock, found, cut):
            await work(task, claim)

    return timed


def _demonstrate(worker: Worker, publisher: Publisher) -> Work:
    tokenizer, end_token = policy_tokenizer(worker)
    max_len, given = worker.config.model.max_len, worker.config.data.chat_template_kwargs

    async def work(task: RolloutTask, claim: Claim) -> None:
        try:
            sample = demonstration(task, tokenizer, end_token=end_token, max_len=max_len, producer=worker.name, template_kwargs=given)
        except (SchemaError, ConfigError) as error:
            logger.warning("event=demonstration_failed task=%d error=%s", task.index, error.message)
            await publisher.task(task, [], [Failure(0, "failed", f"row {task.row}: {error.message}")], claim)
            return
        await publisher.task(task, [msgspec.structs.replace(sample, **claim.told)], [], claim)

    return work


def _in_hand(claims: Sequence[Claims]) -> list[int]:
    return [task for claim in claims for task in claim.open_tasks][:_TASKS_SHOWN]


async def _keep_reporting(worker: Worker, publisher: Publisher, report: Callable[[], Awaitable[None]]) -> None:
    """Publish the worker's metrics, and say when a full stream stalls it and when it goes on."""
    stalled = False
    while True:
        await asyncio.sleep(_REPORT_EVERY_S)
        await report()
        worker.state = publisher.full or "running"
        if publisher.stalled != stalled:
            stalled = publisher.stalled
            await worker.event("stalled" if stalled else "resumed", {"reason": publisher.full})


async def _report(
    worker: Worker, runner: GroupRunner, claims: Sequence[Claims], publisher: Publisher, cut: Cut, front: Front | None
) -> None:
    """Publish what has happened since the last report, and what blocks in user code."""
    counts = [claim.take_counts() for claim in claims]
    published, hung_s, graders = publisher.take_counts(), runner.hung_s(), runner.take_hung_graders()
    cut_tokens, cut_lengths = cut.take()
    lengths = {"lengths/finished": histogram(published.sampled), "lengths/cut": cut_lengths}
    await worker.metrics(
        {
            "producer/tasks_total": sum(count.num_done for count in counts),
            "producer/failures_total": sum(count.num_failures for count in counts),
            "producer/in_flight_tasks": sum(claim.num_open for claim in claims),
            "producer/hung_tasks": len(hung_s),
            "producer/hung_s": max(hung_s, default=0.0),
            "reward/hung": graders.calls,
            "reward/hung_s": graders.longest_s,
            "reward/ended_early_total": graders.ended_early,
            "producer/rollouts_total": published.num_rollouts,
            "tokens/published_total": published.num_tokens,
            **({"tokens/greedy_total": published.greedy} if published.greedy else {}),
            "tokens/cut_total": cut_tokens,
            "bus/redelivered_total": sum(count.num_redelivered for count in counts),
            "bus/full_total": published.num_full,
            **(front.take_metrics() if front is not None else {}),
        },
        {name: one for name, one in lengths.items() if one},
        tasks=_in_hand(claims),
    )
