"""A TrainBatch from lists, for tests of the functional core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamrl.core.batches import TrainBatch
from streamrl.schemas.versions import Version

MakeBatch = Callable[..., TrainBatch]


def _make_batch(samples: Sequence[dict[str, Any]], kind: str = "rl", stage_step: int = 0) -> TrainBatch:
    """Each sample: `prompt` and `answer` token ids, and optionally `mask`, `mu`, `reward`, `task`, `rollout`, `temperature` ..."""
    return TrainBatch.from_lists(
        [s["prompt"] for s in samples],
        [s["answer"] for s in samples],
        loss_mask=[s.get("mask", [True] * len(s["answer"])) for s in samples],
        sampler_logprobs=[s.get("mu", [0.0] * len(s["answer"])) for s in samples],
        rewards=[s.get("reward", 0.0) for s in samples],
        tasks=[s.get("task", i) for i, s in enumerate(samples)],
        rollouts=[s.get("rollout", 0) for s in samples],
        temperature=[s.get("temperature", 1.0) for s in samples],
        top_p=[s.get("top_p", 1.0) for s in samples],
        top_k=[s.get("top_k", -1) for s in samples],
        kind=kind,  # type: ignore[arg-type]
        version=Version(),
        stage_step=stage_step,
    )


@pytest.fixture
def make_batch() -> MakeBatch:
    return _make_batch
