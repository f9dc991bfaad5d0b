"""The built-in producer: one request for a task's whole group, one completion per rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from uuid import uuid4

from streamrl.core.seeds import rollout_seed
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import EngineError
from streamrl.producers.completions import Completion, finished
from streamrl.producers.episode import STATUS, Episode, Segment
from streamrl.producers.protocol import Context, Failure
from streamrl.producers.repeats import Repeats
from streamrl.schemas.tasks import RolloutTask


class SingleTurn:
    """Prompt in, `num_rollouts` completions out; the prompt is sent once, and prefilled once where all of them begin together.

    A greedy rollout is a request of its own, beside. Rollouts that an engine's failure has ended are asked for again, in a request of their
    own; those that had ended stay as they are.
    """

    async def rollout(self, task: RolloutTask, context: Context) -> Sequence[Episode | Failure]:
        """One episode per rollout; rollout k is sampled with seed `rollout_seed(task.seed, k)`.

        Raises:
            EngineUnavailable: engines stay away; the task is to be given back.
        """
        if task.baseline is None:
            return await _sampled(task, context, range(task.num_rollouts))
        try:
            async with asyncio.TaskGroup() as group:
                others = group.create_task(_sampled(task, context, range(task.baseline)))
                greedy = group.create_task(_sampled(task.for_rollout(task.baseline), context, [task.baseline]))
        except* EngineError as errors:
            raise errors.exceptions[0] from None
        return [*others.result(), *greedy.result()]


async def _sampled(task: RolloutTask, context: Context, rollouts: Sequence[int]) -> list[Episode | Failure]:
    given: dict[int, Episode | Failure] = {}
    repeats = Repeats(task.index)
    prompt = Segment(task.prompt_ids)
    while left := [rollout for rollout in rollouts if rollout not in given]:
        started_s = time.time()
        request = GenerateRequest(
            request_id=f"{task.index}-{uuid4().hex}",
            prompt_ids=task.prompt_ids,
            sampling=task.sampling,
            policy=task.policy,
            seeds=tuple(rollout_seed(task.seed, rollout) for rollout in left),
            min_version=task.min_version,
            min_epoch=task.least.epoch,
        )
        found, error = await finished(context.engine, request)
        for index, completion in found.items():
            given[left[index]] = _episode(task, context, prompt, completion, left[index], request.seeds[index], started_s)
        if error is not None and len(found) < len(left) and not await repeats.again(error):
            given = {rollout: Failure(rollout, "failed", f"engine: {error.message}") for rollout in left} | given
    return [given[rollout] for rollout in rollouts]


def _episode(
    task: RolloutTask, context: Context, prompt: Segment, completion: Completion, rollout: int, seed: int, started_s: float
) -> Episode:
    return Episode(
        segments=(prompt, completion.segment),
        finish_reason=completion.finish_reason,
        status=STATUS[completion.finish_reason],
        turns=(completion.text(context.tokenizer),),
        sampling=task.sampling,
        logprob_mode=completion.logprob_mode,
        seed=seed,
        engine=completion.engine,
        rollout=rollout,
        started_s=started_s,
        finished_s=completion.segment.origin.finished_s if completion.segment.origin is not None else time.time(),
    )
