"""The built-in producer: one request for a task's whole group, one completion per rollout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import uuid4

from streamrl.core.seeds import rollout_seed
from streamrl.engines.protocol import GenerateRequest
from streamrl.producers.completions import complete
from streamrl.producers.episode import STATUS, Episode, Segment
from streamrl.producers.protocol import Context, Failure
from streamrl.schemas.tasks import RolloutTask


class SingleTurn:
    """Prompt in, `num_rollouts` completions out; the prompt is sent and prefilled once."""

    async def rollout(self, task: RolloutTask, context: Context) -> Sequence[Episode | Failure]:
        """One episode per rollout; rollout k is sampled with seed `rollout_seed(task.seed, k)`."""
        started_s = time.time()
        seeds = tuple(rollout_seed(task.seed, rollout) for rollout in range(task.num_rollouts))
        request = GenerateRequest(
            request_id=f"{task.index}-{uuid4().hex}",
            prompt_ids=task.prompt_ids,
            sampling=task.sampling,
            policy=task.policy,
            seeds=seeds,
            min_version=task.min_version,
        )
        completions = await complete(context.engine, request)
        finished_s = time.time()
        prompt = Segment(task.prompt_ids)
        return [
            Episode(
                segments=(prompt, completion.segment),
                finish_reason=completion.finish_reason,
                status=STATUS[completion.finish_reason],
                turns=(completion.text(context.tokenizer),),
                sampling=task.sampling,
                logprob_mode=completion.logprob_mode,
                seed=seeds[rollout],
                engine=completion.engine,
                rollout=rollout,
                started_s=started_s,
                finished_s=finished_s,
            )
            for rollout, completion in enumerate(completions)
        ]
