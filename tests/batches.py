"""A TrainBatch from lists, for tests of the functional core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from streamrl.core.batches import TrainBatch
from streamrl.schemas.versions import Version

MakeBatch = Callable[..., TrainBatch]


def _make_batch(samples: Sequence[dict[str, Any]], kind: str = "rl", stage_step: int = 0) -> TrainBatch:
    """Each sample: `prompt` and `answer` token ids, and optionally `mask`, `mu`, `reward`, `task`, `rollout`, `temperature`."""
    tokens = [list(s["prompt"]) + list(s["answer"]) for s in samples]
    masks = [[False] * len(s["prompt"]) + list(s.get("mask", [True] * len(s["answer"]))) for s in samples]
    mu = [[0.0] * len(s["prompt"]) + list(s.get("mu", [0.0] * len(s["answer"]))) for s in samples]
    n = len(samples)
    return TrainBatch(
        kind=kind,  # type: ignore[arg-type]
        version=Version(),
        stage_step=stage_step,
        tokens=np.concatenate([np.array(t, np.int32) for t in tokens]),
        offsets=np.cumsum([0] + [len(t) for t in tokens]).astype(np.int64),
        loss_mask=np.concatenate([np.array(m, np.bool_) for m in masks]),
        sampler_logprobs=np.concatenate([np.array(m, np.float32) for m in mu]),
        staleness=np.zeros(sum(map(len, tokens)), np.int32),
        temperature=np.array([s.get("temperature", 1.0) for s in samples], np.float32),
        top_p=np.array([s.get("top_p", 1.0) for s in samples], np.float32),
        top_k=np.array([s.get("top_k", -1) for s in samples], np.int32),
        rewards=np.array([s.get("reward", 0.0) for s in samples], np.float64),
        tasks=np.array([s.get("task", i) for i, s in zip(range(n), samples, strict=True)], np.int64),
        rollouts=np.array([s.get("rollout", 0) for s in samples], np.int64),
    )


@pytest.fixture
def make_batch() -> MakeBatch:
    return _make_batch
