"""The cosine between gradients of consecutive steps: by hand, in both trainers, and where there is nothing to compare."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from streamrl.config.tree import TrainerConfig
from streamrl.core.batches import sample_of_token
from streamrl.core.packing import split_groups
from streamrl.telemetry.names import METRICS
from streamrl.trainers.mesh import mesh_of
from streamrl.trainers.torch.direction import Direction
from streamrl.trainers.torch.parallel import Parallel
from tests.support.trainers import Rollouts

NAME = "train/grad_cosine"


def test_by_hand() -> None:
    direction = Direction(Parallel(mesh_of(TrainerConfig()), torch.device("cpu")))

    def turned(*values: float, kind: str = "rl") -> float | None:
        return direction.turned(kind, [torch.tensor(values[:1]), torch.tensor(values[1:])])

    assert turned(1.0, 2.0, 2.0) is None, "the first"
    assert turned(-2.0, -4.0, -4.0) == pytest.approx(-1.0)
    assert turned(4.0, 0.0, 3.0) == pytest.approx(-20 / (6 * 5))
    assert turned(4.0, 0.0, 3.0, kind="sft") is None, "another loss"
    assert turned(0.0, 5.0, 0.0, kind="sft") == 0.0
    assert turned(0.0, 0.0, 0.0, kind="sft") is turned(1.0, 0.0, 0.0, kind="sft") is None, "nothing has no direction"
    assert turned(math.inf, 0.0, 0.0, kind="sft") is turned(1.0, 0.0, 0.0, kind="sft") is None
    assert turned(1.0, 0.0, 0.0, kind="sft") == 1.0, "what is given may be written to: a copy was kept"


def test_equal_batches_go_the_same_way_and_opposite_ones_back(
    make_either: Callable[..., Any], rollouts: Rollouts, demonstrations: Rollouts
) -> None:
    """At a rate of 0 a batch has the same gradient again, and with the rewards' sign turned the opposite one."""
    trainer, batch = make_either(rate=0.0, gradient_cosine=True), rollouts()
    assert NAME not in trainer.step(batch).metrics
    assert trainer.step(batch).metrics[NAME] == pytest.approx(1.0, abs=1e-5)
    opposite = msgspec.structs.replace(batch, rewards=-batch.rewards)
    assert trainer.step(opposite).metrics[NAME] == pytest.approx(-1.0, abs=1e-5)
    assert NAME not in trainer.step(demonstrations()).metrics
    assert NAME in METRICS


def test_it_changes_no_bit_and_is_off_where_nobody_asks(make_either: Callable[..., Any], rollouts: Rollouts) -> None:
    plain, measured = make_either(rate=1e-2, minibatches=2), make_either(rate=1e-2, minibatches=2, gradient_cosine=True)
    for step in range(2):
        ours, theirs = measured.step(rollouts(step)), plain.step(rollouts(step))
        assert ours.digest == theirs.digest
        assert NAME not in theirs.metrics and -1.0 < ours.metrics[NAME] < 1.0
        assert ours.metrics["train/loss"] == theirs.metrics["train/loss"]
    assert np.isfinite(ours.metrics[NAME])


@pytest.mark.parametrize("masked", [False, True])
def test_a_last_step_without_a_gradient_takes_no_metric_from_the_others(
    make_either: Callable[..., Any], rollouts: Rollouts, masked: bool
) -> None:
    """Rewards that are all equal in its groups, or no trained token at all."""
    trainer, batch = make_either(rate=0.0, gradient_cosine=True, minibatches=2), rollouts(1)
    _, last = split_groups(batch, 2)
    rewards, mask = batch.rewards.copy(), batch.loss_mask.copy()
    rewards[last] = 0.0
    if masked:
        mask &= ~np.isin(sample_of_token(batch), last)
    names = set(trainer.step(rollouts()).metrics)
    metrics = trainer.step(msgspec.structs.replace(batch, rewards=rewards, loss_mask=mask)).metrics
    assert names <= set(metrics)
    assert -1.0 < metrics[NAME] < 1.0
