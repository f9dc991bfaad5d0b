"""The data bridge's way back: samples of the stream as the turns that a trainer of retrain's takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamrl.bridges.retrain.formats import ProcessedTrajectory, SingleTurnDataForTrainer
from streamrl.errors import SchemaError
from streamrl.producers.protocol import Tokenizer
from streamrl.schemas.samples import Sample


def processed_trajectory(sample: Sample, tokenizer: Tokenizer) -> ProcessedTrajectory:
    """One entry for each turn of the model in a sample that a `RetrainBridge` has made, in their order.

    Nothing is tokenised again: a turn is what the loss mask says, its log-probs are those that its tokens were drawn with, and its prompt
    is all that stands before it, decoded.

    Example: prompt of 2, a turn of 2, an observation of 1, a turn of 1.

        loss mask  0 0 1 1 0 1      turns [2, 4) and [5, 6)

    Raises:
        SchemaError: another producer has made it, or its turns cannot be told apart.
    """
    told: Any = sample.metadata.get("retrain")
    rewards = told.get("rewards_per_turn") if isinstance(told, dict) else None
    if not isinstance(rewards, list):
        raise SchemaError(
            f"expected a sample with the rewards of its turns, got task {sample.task}, rollout {sample.rollout} without",
            hint="samples of create_retrain_bridge have them, unless use_run_reward leaves rewards to the run",
        )
    # edges[i] is +1 where a turn begins at token i and -1 where one has ended before it: [T + 1]
    edges = np.diff(sample.loss_mask.astype(np.int8), prepend=0, append=0)
    turns = [(int(start), int(stop)) for start, stop in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)]
    if len(turns) != len(rewards):
        raise SchemaError(f"expected {len(rewards)} turns in task {sample.task}, rollout {sample.rollout}, its loss mask has {len(turns)}")
    tokens = [int(token) for token in sample.tokens]
    return [
        SingleTurnDataForTrainer(
            prompt_text=tokenizer.decode(tokens[:start]),
            completion_text=tokenizer.decode(tokens[start : stop - (tokens[stop - 1] in tokenizer.stop_ids)]),
            final_combined_reward=float(reward),
            auxiliary_data={"task": sample.task, "rollout": sample.rollout, "status": sample.status.name, "token_ids": tokens[start:stop]},
            old_per_token_logps=np.array(sample.logprobs[start:stop], np.float32),
        )
        for (start, stop), reward in zip(turns, rewards, strict=True)
    ]
