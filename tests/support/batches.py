"""A TrainBatch from lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamrl.core.batches import TrainBatch
from streamrl.schemas.versions import Version


def train_batch(
    samples: Sequence[dict[str, Any]], kind: str = "rl", stage_step: int = 0, *, mu: float = 0.0, reward: float = 0.0
) -> TrainBatch:
    """A batch of version 0.`stage_step`.

    Each sample has `prompt` and `answer` token ids, and optionally `mask` and `mu` (of the answer's tokens), `reward`, `task`, `rollout`,
    `temperature`, `top_p`, `top_k`; `mu` and `reward` of this call are those of samples without.
    """
    tokens = [[*s["prompt"], *s["answer"]] for s in samples]
    masks = [[False] * len(s["prompt"]) + list(s.get("mask", [True] * len(s["answer"]))) for s in samples]
    mus = [[0.0] * len(s["prompt"]) + list(s.get("mu", [mu] * len(s["answer"]))) for s in samples]
    return TrainBatch(
        kind=kind,  # type: ignore[arg-type]
        version=Version(0, stage_step),
        stage_step=stage_step,
        tokens=np.concatenate([np.array(t, np.int32) for t in tokens]),
        offsets=np.cumsum([0] + [len(t) for t in tokens]).astype(np.int64),
        loss_mask=np.concatenate([np.array(m, np.bool_) for m in masks]),
        sampler_logprobs=np.concatenate([np.array(m, np.float32) for m in mus]),
        staleness=np.zeros(sum(map(len, tokens)), np.int32),
        temperature=np.array([s.get("temperature", 1.0) for s in samples], np.float32),
        top_p=np.array([s.get("top_p", 1.0) for s in samples], np.float32),
        top_k=np.array([s.get("top_k", -1) for s in samples], np.int32),
        rewards=np.array([s.get("reward", reward) for s in samples], np.float64),
        tasks=np.array([s.get("task", i) for i, s in enumerate(samples)], np.int64),
        rollouts=np.array([s.get("rollout", 0) for s in samples], np.int64),
    )
