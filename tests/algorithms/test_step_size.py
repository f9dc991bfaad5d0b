"""The rate by the effective sample size of an optimizer step: by hand, and against plain loops."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from streamrl.algorithms.groups import rollout_of_sample
from streamrl.algorithms.step_size import rollout_ess, rollout_log_ratios, scaled_rate
from streamrl.config.tree import OptimizerConfig
from streamrl.core.batches import TrainBatch
from tests.support.batches import train_batch

MakeBatch = Callable[..., TrainBatch]


def one_token_each(log_weights: list[float]) -> tuple[TrainBatch, np.ndarray]:
    """A rollout a weight, of one trained token, and log-probs that make the weights."""
    batch = train_batch([{"prompt": [1], "answer": [2], "task": i, "mu": [-1.0]} for i in range(len(log_weights))])
    logprobs = np.full(batch.num_tokens, np.nan)
    logprobs[batch.loss_mask] = np.array(log_weights) - 1.0
    return batch, logprobs


def test_a_rollout_is_the_product_of_all_its_trained_tokens() -> None:
    """Two samples of one rollout: w = exp(0.5 + 0.25 - 1) and exp(0); the masked token's log-prob is not read."""
    batch = train_batch(
        [
            {"prompt": [1], "answer": [2, 2, 2], "mask": [True, False, True], "mu": [-1.0, 0.0, -1.0], "task": 4, "rollout": 0},
            {"prompt": [1], "answer": [2], "mu": [-1.0], "task": 4, "rollout": 0},
            {"prompt": [1], "answer": [2], "mu": [-1.0], "task": 4, "rollout": 1},
        ]
    )
    logprobs = np.array([9.0, -0.5, np.nan, -0.75, 9.0, -2.0, 9.0, -1.0])
    log_ratio, held = rollout_log_ratios(batch, logprobs, rollout_of_sample(batch.tasks, batch.rollouts))
    assert (log_ratio.tolist(), held.tolist()) == ([-0.25, 0.0], [True, True])
    w = [math.exp(-0.25), 1.0]
    assert rollout_ess(batch, logprobs, np.arange(3)) == pytest.approx(sum(w) ** 2 / (2 * sum(x * x for x in w)))
    batch, logprobs = one_token_each([0.0, 0.0, 5.0, 5.0])
    assert rollout_ess(batch, logprobs, np.array([0, 1])) == rollout_ess(batch, logprobs, np.array([2, 3])) == 1.0
    assert rollout_ess(batch, logprobs, np.arange(4)) < 0.6
    # Neither 800 nats nor a log-prob that is not finite make it NaN; nothing to weigh is 0.
    batch, logprobs = one_token_each([800.0, -800.0, 0.0, 0.0])
    assert rollout_ess(batch, logprobs, np.arange(4)) == 0.25
    logprobs[1] = -np.inf
    assert rollout_ess(batch, logprobs, np.arange(4)) == pytest.approx(2 / 3)
    assert rollout_ess(batch, np.full(batch.num_tokens, np.nan), np.arange(4)) == 0.0
    masked = msgspec.structs.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    assert rollout_ess(masked, logprobs, np.arange(4)) == 0.0
    off, root, linear = (OptimizerConfig(ess_scaling=kind, ess_reference=0.5) for kind in ("off", "sqrt", "linear"))  # type: ignore[arg-type]
    assert [scaled_rate(8.0, 0.125, config) for config in (off, root, linear)] == [8.0, 4.0, 2.0]
    assert [scaled_rate(8.0, ess, root) for ess in (0.5, 0.9, 1.0, 0.0)] == [8.0, 8.0, 8.0, 0.0]
