"""Decisions over all tokens of an optimizer step, against the papers' algorithms word by word."""

from __future__ import annotations

import math

import numpy as np
import pytest

from streamrl.algorithms.choices import choose, chooses, second_moment
from streamrl.config.loss import LossConfig
from streamrl.core.batches import TrainBatch
from tests.core.conftest import MakeBatch


def drawn(seed: int, size: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log pi, log mu and advantages of both signs and 0; some tokens have not moved, and some are as far as others."""
    rng = np.random.default_rng(seed)
    sampler = -rng.exponential(1.0, size)
    moved = rng.standard_normal(size).round(1) * rng.choice([0.0, 0.3, 1.0], size)
    return sampler + moved, sampler, rng.choice([-1.5, -0.5, 0.0, 0.5, 1.0], size)


def left_out_by_m2po(logprobs: np.ndarray, sampler: np.ndarray, advantages: np.ndarray, bound: float) -> set[int]:
    """Algorithm 1 of arXiv 2510.01161: while the mean is above the bound, the furthest goes."""
    ratio = [math.exp(p) / math.exp(m) for p, m in zip(logprobs, sampler, strict=True)]
    trusted = [i for i, a in enumerate(advantages) if (a > 0 and logprobs[i] > sampler[i]) or (a < 0 and logprobs[i] < sampler[i])]
    gone: set[int] = set()
    while trusted and sum(math.log(ratio[i]) ** 2 for i in trusted) / len(trusted) > bound:
        furthest = max(trusted, key=lambda i: (round(math.log(ratio[i]) ** 2, 12), i))
        trusted.remove(furthest)
        gone.add(furthest)
    return gone


@pytest.mark.parametrize("bound", [0.04, 0.003, 0.5, 100.0])
@pytest.mark.parametrize("seed", range(6))
def test_m2po_leaves_out_what_its_algorithm_does(seed: int, bound: float) -> None:
    logprobs, sampler, advantages = drawn(seed)
    found = second_moment(logprobs, sampler, advantages, bound=bound)
    gone = left_out_by_m2po(logprobs, sampler, advantages, bound)
    assert set(np.flatnonzero(found.chosen).tolist()) == gone
    squares = np.square(logprobs - sampler)
    pushed = (advantages * (logprobs - sampler)) > 0
    assert found.metrics["train/m2"] == pytest.approx(squares[pushed].mean())
    kept = pushed & ~found.chosen
    assert found.metrics["train/m2_kept"] == pytest.approx(squares[kept].mean() if kept.any() else 0.0)
    assert found.metrics["train/m2_kept"] <= bound


def test_m2po_looks_at_what_the_advantage_pushes_away_alone() -> None:
    far = np.log([4.0, 4.0, 0.25, 0.25, 4.0, 1.0])
    found = second_moment(far, np.zeros(6), np.array([1.0, -1, -1, 1, 0, 1]), bound=0.04)
    assert found.chosen.tolist() == [True, False, True, False, False, False]


def test_m2po_keeps_the_mean_at_the_bound_itself_and_leaves_out_all_that_are_beyond_it() -> None:
    steps = np.array([0.25, 0.25, 0.75])
    nothing, ones = np.zeros(3), np.ones(3)
    assert second_moment(steps, nothing, ones, bound=(2 * 0.0625 + 0.5625) / 3).chosen.tolist() == [False, False, False]
    assert second_moment(steps, nothing, ones, bound=0.0625).chosen.tolist() == [False, False, True]
    every = second_moment(steps, nothing, ones, bound=0.0624)
    assert every.chosen.all()
    assert every.metrics["train/m2_kept"] == 0.0
    # Of equally far ones the later goes first: [0, 0.5, 0.5] has a mean of 1/6, the first two one of 1/8.
    assert second_moment(np.array([0.5, 1e-9, 0.5]), nothing, ones, bound=0.13).chosen.tolist() == [False, False, True]


def test_m2po_of_nothing() -> None:
    for logprobs in (np.zeros(0), np.zeros(3)):
        found = second_moment(logprobs, np.zeros(len(logprobs)), np.ones(len(logprobs)), bound=0.04)
        assert not found.chosen.any()
        assert found.metrics == {"train/m2": 0.0, "train/m2_kept": 0.0}


@pytest.fixture
def batch(make_batch: MakeBatch) -> TrainBatch:
    return make_batch([{"prompt": [1], "answer": [2] * 4, "task": 0, "rollout": k} for k in range(2)])


def test_a_choice_is_of_the_tokens_it_was_asked_about_and_of_finite_ones(batch: TrainBatch) -> None:
    """Whatever stands elsewhere, NaN included, counts neither in the mean nor among what is left out."""
    loss = LossConfig(policy="m2po", m2po_bound=0.3)
    logprobs = batch.sampler_logprobs.astype(np.float64) + 1.0
    advantages = np.ones(batch.num_tokens)
    near, others = np.array([1, 2, 6]), np.array([3, 4, 7, 8])
    logprobs[near] -= [0.9, 0.5, 0.7]
    asked = np.zeros(batch.num_tokens, np.bool_)
    asked[near] = True
    want = choose(batch, loss, asked, logprobs=logprobs, advantages=advantages)
    # Squares 0.01, 0.25 and 0.09 have a mean of 0.117 with all three.
    assert not want.chosen.any()
    assert want.metrics["train/m2"] == pytest.approx((0.01 + 0.25 + 0.09) / 3, rel=1e-6)
    asked[others] = True
    logprobs[others[:2]], advantages[others[2]] = np.nan, np.inf
    sampler = batch.sampler_logprobs
    sampler[others[3]] = -np.inf
    found = choose(batch, loss, asked, logprobs=logprobs, advantages=advantages)
    assert found.metrics == want.metrics
    assert not found.chosen.any()
    logprobs[2] += 3.0
    assert np.flatnonzero(choose(batch, loss, asked, logprobs=logprobs, advantages=advantages).chosen).tolist() == [2]


def test_who_chooses() -> None:
    assert chooses(LossConfig(policy="m2po"))
    assert not chooses(LossConfig())
    assert not chooses(LossConfig(policy="mine.py:loss"))
