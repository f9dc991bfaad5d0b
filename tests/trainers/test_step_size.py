"""The rate that follows the effective sample size, in both trainers: it scales each step, and a restart comes to the same bits."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.algorithms.step_size import rollout_ess
from streamrl.config.registry import Role
from streamrl.config.tree import OptimizerConfig
from streamrl.core.packing import split_groups
from tests.support.scoring import score
from tests.support.trainers import Rollouts

RATE = 1e-2


@pytest.fixture
def make(make_either: Callable[..., Any]) -> Callable[..., Any]:
    """`make(minibatches=..., **optimizer)`: a trainer of either backend with a constant rate."""

    def trainer(minibatches: int = 1, **optimizer: Any) -> Any:
        return make_either(minibatches=minibatches, optimizer=OptimizerConfig(learning_rate=RATE, schedule="constant", **optimizer))

    return trainer


def test_a_step_is_that_of_the_scaled_rate(make: Callable[..., Any], rollouts: Rollouts) -> None:
    scaled, linear, batch = make(ess_scaling="sqrt"), make(ess_scaling="linear"), rollouts()
    ess = rollout_ess(batch, score(scaled, batch, Role.POLICY), np.arange(batch.num_samples))
    assert 0.05 < ess < 0.95
    found = scaled.step(batch)
    assert found.metrics["train/ess_rollout"] == pytest.approx(ess, rel=1e-4)
    assert found.metrics["train/lr"] == pytest.approx(RATE * ess**0.5, rel=1e-4)
    assert linear.step(batch).metrics["train/lr"] == pytest.approx(RATE * ess, rel=1e-4)
    by_hand = make()
    plain = by_hand.step(batch)
    assert plain.digest != found.digest
    assert (plain.metrics["train/lr"], "train/ess_rollout" in plain.metrics) == (RATE, False)


def test_each_step_has_its_own(make: Callable[..., Any], rollouts: Rollouts) -> None:
    """The first of two steps is scaled by its own rollouts, under the policy before the batch; the second under the one that came of it."""
    trainer, batch = make(minibatches=2, ess_scaling="sqrt"), rollouts()
    before = score(trainer, batch, Role.POLICY)
    first, second = split_groups(batch, 2)
    found = trainer.step(batch).metrics["train/ess_rollout"]
    still = (rollout_ess(batch, before, first) + rollout_ess(batch, before, second)) / 2
    assert found != pytest.approx(still, rel=1e-6)
    assert found == pytest.approx(still, rel=0.5)


def test_fresh_rollouts_keep_the_rate_and_demonstrations_too(
    make: Callable[..., Any], rollouts: Rollouts, demonstrations: Rollouts
) -> None:
    trainer = make(ess_scaling="sqrt", ess_reference=0.99)
    batch = rollouts()
    fresh = msgspec.structs.replace(batch, sampler_logprobs=score(trainer, batch, Role.POLICY).astype(np.float32))
    assert trainer.step(fresh).metrics["train/lr"] == RATE
    assert "train/ess_rollout" not in make(ess_scaling="sqrt").step(demonstrations()).metrics
