"""Estimators over groups: golden numbers, closed forms, uneven groups, one reward per rollout."""

from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

from streamrl.algorithms.advantages import Floats, Reduce, distill, grpo, maxrl, raw, rloo, token_kl, token_rewards, whiten
from streamrl.algorithms.groups import rollout_mean, rollout_of_sample, rollout_rewards
from streamrl.algorithms.kl import kl_estimate
from streamrl.algorithms.returns import discounted_returns
from streamrl.config.loss import KLEstimator
from streamrl.errors import TrainingError
from tests.support.errors import raises

Grouped = Callable[..., tuple[Floats, dict[str, float]]]
ALL: tuple[Grouped, ...] = (raw, grpo, rloo, maxrl)


def advantages(rewards: list[float], tasks: list[int], rollouts: list[int], **options: Any) -> npt.NDArray[np.float64]:
    return grpo(np.array(rewards, np.float64), np.array(tasks), np.array(rollouts), **options)[0]


def test_grpo_by_hand() -> None:
    got = advantages([1, 0, 0, 1], [5] * 4, [0, 1, 2, 3])
    assert got == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)
    assert advantages([1, 0, 0, 1], [5] * 4, [0, 1, 2, 3], normalize_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]
    got = advantages([1, 10, 0, 30, 0], [0, 1, 0, 1, 0], [0, 0, 1, 1, 2])
    assert got[[0, 2, 4]] == pytest.approx(advantages([1, 0, 0], [0] * 3, [0, 1, 2]))
    assert got[[1, 3]] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-6)
    split = advantages([1, 1, 1, 0, 0], [0] * 5, [0, 0, 0, 1, 2])
    whole = advantages([1, 0, 0], [0] * 3, [0, 1, 2])
    assert split.tolist() == [whole[0]] * 3 + whole[1:].tolist()
    assert advantages([3.0, 0.1, 0.1, 0.1], [0, 1, 1, 1], [0, 0, 1, 2]).tolist() == [0.0] * 4
    _, metrics = grpo(np.array([1.0, 1, 0, 0, 0]), np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 0, 1]))
    assert metrics == pytest.approx({"rollout/raw_reward": 0.25, "rollout/raw_reward_std": 0.5**0.5 / 2, "rollout/zero_variance": 0.5})
    with raises(TrainingError, task=4, rollout=1):
        advantages([1, float("nan")], [4, 4], [0, 1])
    with raises(TrainingError, task=4, rollout=1):
        advantages([1, 0], [4, 4], [1, 1])


def of(estimator: Grouped, rewards: list[float], tasks: list[int], rollouts: list[int]) -> list[float]:
    return estimator(np.array(rewards, np.float64), np.array(tasks), np.array(rollouts))[0].tolist()


def test_raw_rloo_and_maxrl_by_hand() -> None:
    assert of(raw, [3, 3, -1], [0, 0, 7], [1, 1, 0]) == [3, 3, -1]
    assert of(rloo, [1, 4, 10], [3] * 3, [0, 1, 2]) == pytest.approx([1 - 7, 4 - 5.5, 10 - 2.5])
    assert of(maxrl, [1, 0, 0, 0, 1, 1, 0], [0] * 4 + [1] * 3, [0, 1, 2, 3, 0, 1, 2]) == pytest.approx([3, -1, -1, -1, 0.5, 0.5, -1])
    assert of(maxrl, [0, 0, 0], [0] * 3, [0, 1, 2]) == [0, 0, 0]
    with raises(TrainingError, estimator="maxrl", task=5, rollout=2):
        of(maxrl, [0, -1, 1], [5, 5, 5], [0, 2, 3])


@pytest.mark.parametrize("estimator", ALL)
def test_all_report_the_same_metrics_and_refuse_the_same_rewards(estimator: Grouped) -> None:
    rewards, tasks, rollouts = np.array([1.0, 1, 0, 0, 0]), np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 0, 1])
    assert estimator(rewards, tasks, rollouts)[1] == grpo(rewards, tasks, rollouts)[1]
    with raises(TrainingError, reward=float("inf"), task=4, rollout=1):
        of(estimator, [1, float("inf")], [4, 4], [0, 1])
    # Groups of one and equal rewards get exactly zero.
    assert estimator is raw or of(estimator, [3.0, 0.1, 0.1, 0.1], [0, 1, 1, 1], [0, 0, 1, 2]) == [0.0] * 4


def test_tokens_that_the_teacher_likes_better_gain() -> None:
    advantages, reverse_kl = distill(
        np.array([1.0, 1.0, 9.0]), np.array([-2.0, -1.0, np.nan]), np.array([-1.0, -3.0, -1.0]), np.array([True, True, False]), coef=0.5
    )
    assert advantages.tolist() == [1.5, 0.0, 9.0]
    assert reverse_kl.tolist() == [-1.0, 2.0, 0.0]


K3 = [0.106531, 0.718282, 0]
KL_GOLDEN: dict[KLEstimator, list[float]] = {"k1": [0.5, -1, 0], "k2": [0.125, 0.5, 0], "abs": [0.5, 1, 0], "k3": K3, "low_var_kl": K3}


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
def test_a_penalty_in_the_reward_is_the_one_in_the_loss(estimator: KLEstimator) -> None:
    r = np.concatenate([np.linspace(-25, 25, 41), [1e-6, -0.3]])
    assert token_kl(r, estimator) == pytest.approx(kl_estimate(torch.from_numpy(r), estimator).numpy(), rel=1e-9, abs=1e-12)


def test_kl_golden_and_bounds() -> None:
    for estimator, expected in KL_GOLDEN.items():
        assert token_kl(np.array([0.5, -1.0, 0.0]), estimator) == pytest.approx(expected, abs=1e-6), estimator
    assert token_kl(np.array([-3.0, -30.0]), "low_var_kl").tolist() == [10, 10]
    assert token_kl(np.array([-30.0, 30.0]), "k3") == pytest.approx([np.exp(20.0) - 21, np.exp(-30.0) + 29])
    assert token_kl(np.array([1e-9]), "k3")[0] <= 1e-17


def test_rewards_of_tokens_by_hand() -> None:
    mask = np.array([True, True, False, True])
    rewards = token_rewards(np.array([1.0]), np.array([0, 4]), mask, kl=np.array([0.1, 0.2, 0.3, 0.4]), kl_coef=0.1)
    assert rewards == pytest.approx([-0.01, -0.02, 0, 0.96])
    assert discounted_returns(rewards, np.array([0, 4]), gamma=0.9) == pytest.approx([0.6718, 0.7576, 0.8640, 0.9600], abs=5e-5)
    mask = np.array([False, True, True, False, False, False, True, True, False, True])
    offsets = np.array([0, 4, 4, 6, 9, 10])
    got = token_rewards(np.array([1.0, 2, 4, 8, 16]), offsets, mask, kl=np.where(mask, 1.0, np.nan), kl_coef=0.5)
    assert got.tolist() == [0, -0.5, 0.5, 0, 0, 0, -0.5, 7.5, 0, 15.5]
    assert token_rewards(np.array([3.0]), np.array([0, 2]), np.array([True, True]), kl=None, kl_coef=1.0).tolist() == [0, 3]


def test_whitening_by_hand() -> None:
    got = whiten(np.array([1.0, 3.0, np.nan]), np.array([True, True, False]))
    assert got == pytest.approx([-1 / np.sqrt(2 + 1e-8), 1 / np.sqrt(2 + 1e-8), 0], rel=1e-12)
    # Values 1e-4 apart: their variance 5e-9 is smaller than the epsilon, 1e-8.
    assert whiten(np.array([0.0, 1e-4]), np.ones(2, np.bool_)) == pytest.approx(np.array([-5e-5, 5e-5]) / np.sqrt(1.5e-8))
    assert whiten(np.array([7.0, 8.0]), np.array([True, False])).tolist() == [0, 0]
    assert whiten(np.full(4, 0.25), np.ones(4, np.bool_)).tolist() == [0] * 4
    with raises(TrainingError, trained=0):
        whiten(np.ones(3), np.zeros(3, np.bool_))
    assert whiten(np.array([1e8, 1e8 + 1, 1e8 + 2]), np.ones(3, np.bool_)) == pytest.approx([-1, 0, 1], rel=1e-7)


def both_ranks(run: Callable[[int, Reduce], None]) -> None:
    """`run(rank, reduce)` on two threads, with gloo's sum between them."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    failures: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=60))

            def reduce(array: np.ndarray) -> np.ndarray:
                tensor = torch.from_numpy(array.copy())
                group.allreduce([tensor]).wait()
                return tensor.numpy()

            run(number, reduce)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("cut", [0, 1, 6])
def test_two_ranks_over_gloo_equal_one(cut: int) -> None:
    """Also where a rank has no token, or none that is trained."""
    values = np.random.default_rng(0).normal(3, 2, 10)
    mask = np.array([False, True, True, False, True, True, True, False, True, True])
    found: dict[int, np.ndarray] = {}
    part = {0: slice(0, cut), 1: slice(cut, 10)}
    both_ranks(lambda rank, reduce: found.__setitem__(rank, whiten(values[part[rank]], mask[part[rank]], reduce=reduce)))
    assert np.concatenate([found[0], found[1]]) == pytest.approx(whiten(values, mask), abs=1e-14)


def test_votes_are_one_found_in_order_of_task_and_rollout() -> None:
    found = rollout_rewards(np.array([5.0, 1, 1, 3, 7]), np.array([9, 2, 2, 2, 2]), np.array([0, 1, 1, 0, 4]))
    assert found.rewards.tolist() == [3, 1, 7, 5]
    assert found.rollout_of_sample.tolist() == [3, 1, 1, 0, 2]
    assert found.group.tolist() == [0, 0, 0, 1]
    assert found.size.tolist() == [3, 1]
    assert found.mean == pytest.approx([11 / 3, 5])
    assert found.std == pytest.approx([np.std([3, 1, 7], ddof=1), 0])
    assert found.flat.tolist() == [False, True]
    assert found.centred == pytest.approx([3 - 11 / 3, 1 - 11 / 3, 7 - 11 / 3, 0])
    found = rollout_rewards(np.full(3, 0.1), np.zeros(3, np.int64), np.arange(3))
    assert found.centred.tolist() == [0, 0, 0] and found.std.tolist() == [0]
    assert found.metrics["rollout/raw_reward_std"] == 0 and found.metrics["rollout/zero_variance"] == 1
    assert rollout_of_sample(np.array([1, 0, 1, 0]), np.array([0, 0, 0, 1])).tolist() == [2, 0, 2, 1]
    with raises(TrainingError, task=4, rollout=1):
        rollout_rewards(np.array([0.0, 1, 2]), np.array([3, 4, 4]), np.array([0, 1, 1]))


def test_mean_over_each_rollouts_tokens_then_over_rollouts_with_tokens() -> None:
    values = np.array([1.0, 3.0, np.nan, 10.0, np.nan])
    mask = np.array([True, True, False, True, False])
    assert rollout_mean(values, mask, np.array([0, 0, 0, 2, 3])) == (2.0 + 10.0) / 2
    assert rollout_mean(np.ones(2), np.zeros(2, np.bool_), np.array([0, 1])) == 0.0
