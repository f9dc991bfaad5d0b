"""Sizes and batches of tests on GPUs. The import sets what cuBLAS reads once, as the trainer's process does before torch begins."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from collections.abc import Sequence
from typing import Any

from streamrl.core.batches import TrainBatch

SMALL: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 256, "head_dim": 64, "num_attention_heads": 4}
LONG: dict[str, Any] = {**SMALL, "max_position_embeddings": 1024}


def answered(prompt: list[int], answers: Sequence[list[int]], *, group: int, mu: float, step: int) -> TrainBatch:
    """Groups of so many answers to one prompt, of which the first is rewarded; `mu`: the sampler's log-prob of each token."""
    count = len(answers)
    return TrainBatch.from_lists(
        [prompt] * count,
        answers,
        rewards=[float(i % group == 0) for i in range(count)],
        sampler_logprobs=[[mu] * len(answer) for answer in answers],
        tasks=[i // group for i in range(count)],
        stage_step=step,
    )
