"""The batch of a cell: groups that share a prompt, answers of log-normal lengths, random tokens and rewards. Equal seeds, equal batches."""

from __future__ import annotations

import math

import numpy as np
from msgspec.structs import replace

from benchmarks.shapes import shape_of
from benchmarks.trainer.spec import SPREAD, TrainerSpec, longest_sample
from streamrl.core.batches import TrainBatch
from streamrl.schemas.versions import Version

_FIRST_TOKEN = 3
"""Those before it are special ones."""


def make_batch(spec: TrainerSpec, mean: int) -> TrainBatch:
    """The batch of answers of this mean."""
    rng = np.random.default_rng((spec.seed, mean))
    vocab = shape_of(spec.shape).vocab
    groups = max(1, round(spec.batch_tokens / (spec.rollouts * (spec.prompt_tokens + mean))))
    drawn = rng.lognormal(math.log(mean) - SPREAD**2 / 2, SPREAD, groups * spec.rollouts)
    lengths = np.clip(drawn, 8, longest_sample(spec, mean) - spec.prompt_tokens).astype(int).tolist()
    prompts = [rng.integers(_FIRST_TOKEN, vocab, spec.prompt_tokens).tolist() for _ in range(groups)]
    # A random model's distribution is nearly uniform: so the sampler's log-probs are nearly the trainer's.
    return TrainBatch.from_lists(
        [prompts[number // spec.rollouts] for number in range(len(lengths))],
        [rng.integers(_FIRST_TOKEN, vocab, length).tolist() for length in lengths],
        rewards=rng.random(len(lengths)).tolist(),
        sampler_logprobs=[[-math.log(vocab)] * length for length in lengths],
        tasks=np.repeat(np.arange(groups), spec.rollouts).tolist(),
    )


def at_step(batch: TrainBatch, step: int) -> TrainBatch:
    """The same batch, to be trained as the one after `step` others."""
    return replace(batch, version=Version(0, step), stage_step=step)
