"""A producer whose rollouts have lengths with a heavy tail: each is as long as its own log-normal draw, however the text goes on."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from streamrl.core.seeds import rollout_seed, uniform


def length(row: int, rollout: int, *, median: float, sigma: float, longest: int) -> int:
    """Tokens of a rollout: a function of dataset row and rollout alone, so every run that asks the same rows has the same lengths."""
    seeds = np.array([rollout_seed(row, rollout)], np.uint64)
    u = float(uniform(seeds, np.zeros(1, np.int64))[0])
    return max(1, min(longest, round(median * math.exp(sigma * NormalDist().inv_cdf(u + 2.0**-54)))))


async def heavy_tail(task, engine):
    options = engine.options
    tokens = length(
        task.row,
        engine.context.rollout_index,
        median=options["median"],
        sigma=options["sigma"],
        longest=task.sampling.max_new_tokens,
    )
    chat = engine.chat(task)
    await chat.generate(max_new_tokens=tokens)
    return chat.episode()
