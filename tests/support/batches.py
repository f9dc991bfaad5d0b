"""A TrainBatch from samples as mappings."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from streamrl.core.batches import TrainBatch
from streamrl.schemas.versions import Version


def train_batch(
    samples: Sequence[dict[str, Any]], kind: str = "rl", stage_step: int = 0, *, mu: float = 0.0, reward: float = 0.0
) -> TrainBatch:
    """A batch of version 0.`stage_step`."""
    return TrainBatch.from_lists(
        [s["prompt"] for s in samples],
        [s["answer"] for s in samples],
        loss_mask=[s.get("mask", [True] * len(s["answer"])) for s in samples],
        sampler_logprobs=[s.get("mu", [mu] * len(s["answer"])) for s in samples],
        rewards=[s.get("reward", reward) for s in samples],
        tasks=[s.get("task", i) for i, s in enumerate(samples)],
        rollouts=[s.get("rollout", 0) for s in samples],
        temperature=[s.get("temperature", 1.0) for s in samples],
        top_p=[s.get("top_p", 1.0) for s in samples],
        top_k=[s.get("top_k", -1) for s in samples],
        min_p=[s.get("min_p", 0.0) for s in samples],
        logit_bias=[s.get("logit_bias", {}) for s in samples],
        kind=kind,  # type: ignore[arg-type]
        version=Version(0, stage_step),
        stage_step=stage_step,
    )


def by_turn(batch: TrainBatch) -> TrainBatch:
    """The batch with temperatures that differ from token to token."""
    drawn = np.random.default_rng(batch.stage_step).choice(np.array([0.4, 0.7, 1.0, 1.3], np.float32), batch.num_tokens)
    return msgspec.structs.replace(batch, temperature=drawn)
