"""The rewarder worker: takes requests for rewards off their queue, scores them with the run's reward, and publishes what it found.

As many as one likes may share the work, and come and go; `streamrl.producers.grading` says what makes that safe. What a grader fails ends
its rollout as a tombstone with the reason: `failed`, `timeout`, or `deliveries` for what kills the processes that score it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.bus.protocol import Lease
from streamrl.engines.protocol import Chunk, EngineInfo, GenerateRequest
from streamrl.errors import BusError, ConfigError, EngineError, SchemaError
from streamrl.producers.claims import Claims
from streamrl.producers.episode import Episode, reward_of
from streamrl.producers.factory import make_runner
from streamrl.producers.grading import REVISION, GradingRequest
from streamrl.producers.protocol import Claim, Failure
from streamrl.producers.publishing import Publisher
from streamrl.producers.rollouts import check_reward, leave_when_finished
from streamrl.runtime.worker import farewell
from streamrl.schemas.samples import RewardUpdate
from streamrl.schemas.subjects import GRADING, MAIN_SOURCE

if TYPE_CHECKING:
    from streamrl.config.tree import Config
    from streamrl.producers.groups import Group, GroupRunner
    from streamrl.runtime.worker import Worker

logger = logging.getLogger(__name__)

MOST_DELIVERIES = 64
"""A request that has come more often ends its rollouts: it may be what kills rewarders. Its neighbours, and drains, come nowhere near."""
_REPORT_EVERY_S = 2.0
_TASKS_SHOWN = 256


class Asked(msgspec.Struct, frozen=True):
    """A claimed request."""

    number: int
    """Its sequence, which its samples name."""
    request: GradingRequest


class Requests:
    """The queue of requests, for `Claims`."""

    stream = GRADING
    follows_ends = False
    """A task that waits for its rewards counts as ended for those who roll out."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._read: dict[int, GradingRequest | None] = {}

    def task(self, lease: Lease) -> int:
        """Index of its task; -1 where it cannot be read."""
        try:
            found = GradingRequest.decode(lease.body)
        except SchemaError as error:
            logger.error("event=request_unreadable sequence=%d error=%s", lease.sequence, error.message)
            found = None
        self._read[lease.sequence] = found
        return -1 if found is None else found.task.index

    async def read(self, lease: Lease) -> Asked | None:
        """The request; None, and an event for people, where it is none: whoever stored it wrote no request of this version."""
        found = self._read.pop(lease.sequence)
        if found is None:
            await self._worker.event("grading_unreadable", {"sequence": lease.sequence, "bytes": len(lease.body)})
        return None if found is None else Asked(lease.sequence, found)


class Scored:
    """What has happened since the last report."""

    def __init__(self) -> None:
        self.graded = 0
        self.failed = 0
        self.seconds = 0.0
        self.groups = 0


class Rewarder:
    """Scores requests and publishes the answers.

    Args:
        runner: with the run's reward.
        publisher: of this worker.
    """

    def __init__(self, runner: GroupRunner, publisher: Publisher) -> None:
        self._runner = runner
        self._publisher = publisher
        self._scored = Scored()

    def take(self) -> Scored:
        """What has happened since the last call."""
        scored, self._scored = self._scored, Scored()
        return scored

    async def work(self, asked: Asked, claim: Claim) -> None:
        """Score one request; returns once all its answers are stored."""
        request, began_s = asked.request, time.monotonic()
        waiting = request.waiting  # before they are scored: episodes are given their rewards in place
        if claim.deliveries > MOST_DELIVERIES:
            detail = f"reward: its request came {claim.deliveries} times and was never answered"
            answers = [self._fail(asked, Failure(rollout, "deliveries", detail), claim) for rollout in request.rollouts]
        else:
            group = await self._runner.score(request.task, request.episodes)
            answers = self._answers(asked, waiting, group, claim)
            self._scored.groups += 1
            self._scored.seconds += time.monotonic() - began_s
        async with asyncio.TaskGroup() as storing:
            for answer in answers:
                storing.create_task(answer)

    def _answers(self, asked: Asked, waiting: Sequence[tuple[int, str]], group: Group, claim: Claim) -> list[Coroutine[Any, Any, None]]:
        failures = {failure.rollout: failure for failure in group.failures}
        found: dict[int, list[Episode | None]] = {}
        for rollout, agent in waiting:
            episodes = [episode for episode in group.episodes if (episode.rollout, episode.agent) == (rollout, agent)]
            found.setdefault(rollout, []).append(reward_of(episodes) if episodes else None)
        answers: list[Coroutine[Any, Any, None]] = []
        for rollout, rewarded in found.items():
            if all(one is not None for one in rewarded):
                answers += [self._reward(asked, one) for one in rewarded if one is not None]
            else:
                failure = failures.get(rollout, Failure(rollout, "failed", "reward: it gave none"))
                answers.append(self._fail(asked, failure, claim))
        return answers

    async def _reward(self, asked: Asked, rewarded: Episode) -> None:
        """The reward of an episode, which is its agent's where it has one, else its rollout's."""
        assert rewarded.reward is not None
        update = RewardUpdate(
            task=asked.request.task.index,
            rollout=rewarded.rollout,
            reward=rewarded.reward,
            revision=REVISION,
            reward_parts=rewarded.reward_parts,
            agent=rewarded.agent or msgspec.UNSET,
            grading=asked.number,
        )
        await self._publisher.reward(update)
        self._scored.graded += 1

    async def _fail(self, asked: Asked, failure: Failure, claim: Claim) -> None:
        await self._publisher.failed_grading(asked.request.task, failure, asked.number, claim)
        self._scored.failed += 1


class NoEngine:
    """A reward asks no engine of the run's."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Raises EngineError."""
        raise EngineError("a rewarder has no engine")
        yield  # makes it a generator

    async def abort(self, request_id: str) -> None:
        """There is nothing to abort."""

    async def info(self) -> EngineInfo:
        """Raises EngineError."""
        raise EngineError("a rewarder has no engine")


def check_wanted(config: Config) -> None:
    """Raise ConfigError for a run whose producers score by themselves."""
    if not config.reward.workers:
        raise ConfigError(
            f"run {config.run.name} has reward.workers = 0: its producers score their rollouts, so there is nothing for a rewarder",
            hint="set reward.workers = 1 or more and start the run again",
            key="reward.workers",
        )


async def join(worker: Worker) -> None:
    """Score beside the run's own rewarders until the worker drains or the run has finished.

    Raises:
        ConfigError: the code of the reward here is not what the run was last started with, or as `main`.
    """
    await check_reward(worker)
    leaver = asyncio.create_task(leave_when_finished(worker))
    try:
        await main(worker)
    finally:
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)


async def main(worker: Worker) -> None:
    """Score the run's requests until the worker drains.

    Raises:
        ConfigError: the run's producers score by themselves, or its reward cannot be loaded.
    """
    config = worker.config
    check_wanted(config)
    runner = make_runner(worker, NoEngine(), "single_turn", key="producer.function")
    publisher = Publisher(worker.bus, worker.subjects, producer=worker.name)
    rewarder, requests = Rewarder(runner, publisher), Requests(worker)
    claims = Claims(
        worker.bus,
        publisher,
        MAIN_SOURCE,
        rewarder.work,
        concurrency=config.producer.concurrency,
        ack_wait_s=config.bus.ack_wait_s,
        queue=requests,
    )
    besides = worker.detail
    worker.detail = lambda: {**besides(), "tasks": claims.open_tasks[:_TASKS_SHOWN]}
    worker.wait = lambda: f"scores: {claims.num_open} groups" if claims.num_open else "waits for requests for rewards"
    report = partial(_report, worker, runner, claims, rewarder, publisher)
    try:
        await runner.start()
        async with asyncio.TaskGroup() as group:
            reporting = group.create_task(_keep_reporting(worker, publisher, report))
            await claims.run(worker.draining)
            reporting.cancel()
        async with farewell():
            await report()
    finally:
        await runner.close()


async def _keep_reporting(worker: Worker, publisher: Publisher, report: Callable[[], Awaitable[None]]) -> None:
    stalled = False
    while True:
        await report()
        worker.state = publisher.full or "running"
        if publisher.stalled != stalled:
            stalled = publisher.stalled
            await worker.event("stalled" if stalled else "resumed", {"reason": publisher.full})
        await asyncio.sleep(_REPORT_EVERY_S)


async def _report(worker: Worker, runner: GroupRunner, claims: Claims, rewarder: Rewarder, publisher: Publisher) -> None:
    scored, counts, graders = rewarder.take(), claims.take_counts(), runner.take_hung_graders()
    values: dict[str, float] = {
        "rewarder/graded_total": scored.graded,
        "rewarder/failed_total": scored.failed,
        "rewarder/in_flight_groups": claims.num_open,
        "reward/hung": graders.calls,
        "reward/hung_s": graders.longest_s,
        "reward/ended_early_total": graders.ended_early,
        "bus/redelivered_total": counts.num_redelivered,
        "bus/full_total": publisher.take_counts().num_full,
    }
    if scored.groups:
        values["rewarder/group_s"] = scored.seconds / scored.groups
    try:
        values["rewarder/waiting_groups"] = (await worker.bus.state(GRADING)).messages
    except BusError as error:
        logger.warning("event=queue_unknown error=%s", error.message)
    await worker.metrics(values)
