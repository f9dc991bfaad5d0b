"""A set of problems put to engines, as many at once as these have slots for, and its answers stored as they come."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from streamrl.config.bridges import sections_of
from streamrl.config.code import code_digests
from streamrl.config.evaluation_sets import ProblemSet
from streamrl.config.loss import is_function
from streamrl.config.tree import Config
from streamrl.core.seeds import run_seed, task_seed
from streamrl.data.problems import Problem, Problems
from streamrl.errors import EngineError, SchemaError
from streamrl.producers.children.jobs import Keeping
from streamrl.producers.episode import Episode, reward_of
from streamrl.producers.evaluation.results import summarize
from streamrl.producers.evaluation.store import ProblemRecord, SampleRecord, SetStore
from streamrl.producers.groups import Group, GroupRunner
from streamrl.producers.protocol import Failure
from streamrl.rewards.votes import answer_of
from streamrl.runtime.retries import pause_s
from streamrl.schemas.tasks import RolloutTask, turn_sampling
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)

Counted = Callable[[], contextlib.AbstractContextManager[object]]

SOURCE = "evaluation"
AHEAD = 2.0
"""Samples asked for, as a multiple of the slots: even where all of them end at once, as many wait at the engine."""
_ATTEMPTS = 5
_RETRY_S = 1.0
_MAX_RETRY_S = 30.0


class Room:
    """Bounds the samples that are asked for at once; one caller of `take`.

    Args:
        most: how many now; engines may come and go. Whatever it says, one problem is let in.
    """

    def __init__(self, most: Callable[[], float]) -> None:
        self._most = most
        self._taken = 0
        self._given = asyncio.Event()

    async def take(self, count: int) -> None:
        """Wait until there is room for so many more."""
        while self._taken and self._taken + count > self._most():
            self._given.clear()
            await self._given.wait()
        self._taken += count

    def give(self, count: int) -> None:
        """So many have ended."""
        self._taken -= count
        self._given.set()


def asked_digest(one: ProblemSet, rows: Problems, weights: str) -> str:
    """SHA-256 (hex) of what decides a set's answers and their rewards; where they lie, and how many problems are asked, does not."""
    config, data = one.config, one.config.data
    named = {"function": config.producer.function, "reward": config.reward.kind}
    code = code_digests({key: reference for key, reference in named.items() if is_function(reference)})
    told: list[Any] = [
        *(rows.digest, weights, one.n, one.sampling, config.producer.options, config.reward.options, config.reward.key),
        *({key: code.get(key, reference) for key, reference in named.items()}, data.chat_template, data.chat_template_kwargs),
        # What is read of a row; and records are by place among the problems that are not too long.
        *(data.prompt_key, data.label_key, data.metadata_key, data.tools_key, data.sampling_key, data.chat_template_kwargs_key),
        *(data.reward_key, data.reward_options if data.reward_key else {}, data.max_prompt_tokens),
        *(config.model.max_len, config.run.seed),
        *(getattr(config, section) for section in sections_of(named.values())),
        # Of images, what the files have now: the digest of the rows has their names.
        *([data.images_key, *(each.image.sha256 for problem in rows.problems for each in problem.images)] if data.images_key else []),
    ]
    return hashlib.sha256(msgspec.json.encode(msgspec.to_builtins(told, str_keys=True), order="deterministic")).hexdigest()


async def evaluate(
    one: ProblemSet,
    rows: Problems,
    runner: GroupRunner,
    store: SetStore,
    *,
    version: Version,
    room: Room,
    pinned: bool = False,
    counted: Counted = contextlib.nullcontext,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Ask what is not stored yet at `version` or later, each problem within a `counted()`; the detail of the set's event.

    Raises:
        OSError: an answer cannot be stored.
        ConfigError: user code can no longer be loaded.
    """
    problems, number = rows.problems[: one.num_problems], version.number
    left = [problem for problem in problems if problem.row not in store.found]
    resumed = len(problems) - len(left)
    if resumed:
        logger.info("event=evaluation_resumed set=%s version=%d stored=%d left=%d", one.name, number, resumed, len(left))
    began_s = time.monotonic()

    async def ask(problem: Problem) -> None:
        try:
            with counted():
                record = _record(one, problem, await _ask(runner, _task(one, problem, version), problem))
            store.add(record)
            told(len(store.found), len(problems))
        finally:
            room.give(one.n)

    try:
        async with asyncio.TaskGroup() as group:
            for problem in left:
                await room.take(one.n)
                group.create_task(ask(problem))
    except* Exception as errors:  # one tells as much as all of them
        raise errors.exceptions[0] from None
    took_s = time.monotonic() - began_s
    detail = await asyncio.to_thread(summarize, one, problems, store.found, number=number, pinned=pinned, took_s=took_s, resumed=resumed)
    await asyncio.to_thread(store.sync)
    store.write_result(detail)
    return detail


def _task(one: ProblemSet, problem: Problem, version: Version) -> RolloutTask:
    config: Config = one.config
    sampling = turn_sampling(one.sampling, problem.sampling)
    room = max(1, config.model.max_len - len(problem.prompt_ids))
    return RolloutTask(
        run=config.run.name,
        index=problem.row,
        source=SOURCE,
        row=problem.row,
        prompt_ids=problem.prompt_ids,
        prompt=problem.prompt,
        label=problem.label,
        tools=problem.tools,
        metadata=problem.metadata,
        chat_template_kwargs=problem.chat_template_kwargs,
        reward=problem.reward,
        num_rollouts=one.n,
        sampling=msgspec.structs.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)),
        min_version=version.number,
        min_epoch=version.epoch or msgspec.UNSET,
        seed=task_seed(run_seed(config.run.name, config.run.seed), problem.row),
        image_rows=tuple(one.image for one in problem.images) or msgspec.UNSET,
    )


async def _ask(runner: GroupRunner, task: RolloutTask, problem: Problem) -> Group:
    """One problem's answers; when an engine goes away another one is asked, a few times, and then they count as failed."""
    failure = Failure(0)

    async def image(place: int) -> bytes:
        if not 0 <= place < len(problem.images):
            raise SchemaError(f"expected the place of one of {len(problem.images)} images, from 0 on, got {place}")
        return problem.images[place].data

    for attempt in range(_ATTEMPTS):
        try:
            return await runner.run(task, keeping=Keeping(images=image))
        except EngineError as error:
            logger.warning("event=problem_retried row=%d attempt=%d error=%s", task.row, attempt + 1, error.message)
            failure = Failure(0, "failed", f"engine: {error.message}")
            await asyncio.sleep(pause_s(attempt + 1, first_s=_RETRY_S, most_s=_MAX_RETRY_S))
    return Group((), tuple(msgspec.structs.replace(failure, rollout=rollout) for rollout in range(task.num_rollouts)))


def _record(one: ProblemSet, problem: Problem, group: Group) -> ProblemRecord:
    failures = {failure.rollout: failure for failure in group.failures}
    episodes: dict[int, list[Episode]] = {}
    for episode in group.episodes:
        episodes.setdefault(episode.rollout, []).append(episode)
    kind = one.config.reward.kind if isinstance(problem.reward, msgspec.UnsetType) else problem.reward.kind
    made = (
        sample_record(kind, problem, episodes[rollout], one.config.evaluation.text_chars)
        if rollout in episodes
        else _failed(failures.get(rollout, Failure(rollout)))
        for rollout in range(one.n)
    )
    return ProblemRecord(row=problem.row, samples=tuple(made))


def sample_record(kind: str, problem: Problem, episodes: Sequence[Episode], text_chars: int) -> SampleRecord:
    """One rollout; its reward is that which it would have in training (`reward_of`).

    Args:
        kind: of the reward that scored it.
        problem: what was asked.
        episodes: of the rollout, in their order.
        text_chars: `evaluation.text_chars`.
    """
    answer = reward_of(episodes) or next((episode for episode in reversed(episodes) if not episode.agent), episodes[-1])
    versions = sorted({span.version for e in episodes for segment in e.segments for span in segment.spans if span.version})
    return SampleRecord(
        reward=answer.reward,
        status=str(answer.status) if answer.reward is not None else "failed",
        tokens=sum(sum(episode.num_sampled) for episode in episodes),
        answer=None if answer.reward is None else answer_of(kind, answer, problem.metadata),
        text=shortened(answer.completion, text_chars),
        detail="" if answer.reward is not None else "it was given no reward",
        versions=(str(versions[0]), str(versions[-1])) if versions else (),
    )


def _failed(failure: Failure) -> SampleRecord:
    return SampleRecord(status=failure.reason, detail=failure.detail[:400])


def shortened(text: str, most: int) -> str:
    """A text, or its beginning and its end."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... {text[len(text) - most // 2 :]}" if most else ""
