"""Decisions over all tokens of an optimizer step, against the papers' algorithms word by word."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from streamrl.algorithms.choices import StepTokens, clip_cov, covariances, decide, decides, highest_entropies, kl_cov, second_moment
from streamrl.config.loss import LossConfig
from streamrl.core.batches import TrainBatch
from streamrl.schemas.versions import Version


def tokens_of(logprobs: np.ndarray, sampler: np.ndarray, advantages: np.ndarray) -> StepTokens:
    return StepTokens(logprobs, sampler, advantages, np.random.default_rng(0).random(len(logprobs)))


def drawn(seed: int, size: int = 60) -> StepTokens:
    """log pi, log mu and advantages of both signs and 0; some tokens have not moved, and some are as far as others."""
    rng = np.random.default_rng(seed)
    sampler = -rng.exponential(1.0, size)
    moved = rng.standard_normal(size).round(1) * rng.choice([0.0, 0.3, 1.0], size)
    return tokens_of(sampler + moved, sampler, rng.choice([-1.5, -0.5, 0.0, 0.5, 1.0], size))


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
    tokens = drawn(seed)
    logprobs, sampler, advantages, _ = tokens
    found = second_moment(tokens, bound=bound)
    gone = left_out_by_m2po(logprobs, sampler, advantages, bound)
    assert set(np.flatnonzero(found.chosen).tolist()) == gone
    squares = np.square(logprobs - sampler)
    pushed = (advantages * (logprobs - sampler)) > 0
    assert found.metrics["train/m2"] == pytest.approx(squares[pushed].mean())
    kept = pushed & ~found.chosen
    assert found.metrics["train/m2_kept"] == pytest.approx(squares[kept].mean() if kept.any() else 0.0)
    assert found.metrics["train/m2_kept"] <= bound


def test_m2po_by_hand() -> None:
    far = np.log([4.0, 4.0, 0.25, 0.25, 4.0, 1.0])
    found = second_moment(tokens_of(far, np.zeros(6), np.array([1.0, -1, -1, 1, 0, 1])), bound=0.04)
    assert found.chosen.tolist() == [True, False, True, False, False, False]
    steps = np.array([0.25, 0.25, 0.75])
    nothing, ones = np.zeros(3), np.ones(3)
    assert second_moment(tokens_of(steps, nothing, ones), bound=(2 * 0.0625 + 0.5625) / 3).chosen.tolist() == [False, False, False]
    assert second_moment(tokens_of(steps, nothing, ones), bound=0.0625).chosen.tolist() == [False, False, True]
    every = second_moment(tokens_of(steps, nothing, ones), bound=0.0624)
    assert every.chosen.all()
    assert every.metrics["train/m2_kept"] == 0.0
    # Of equally far ones the later goes first: [0, 0.5, 0.5] has a mean of 1/6, the first two one of 1/8.
    assert second_moment(tokens_of(np.array([0.5, 1e-9, 0.5]), nothing, ones), bound=0.13).chosen.tolist() == [False, False, True]
    for logprobs in (np.zeros(0), np.zeros(3)):
        found = second_moment(tokens_of(logprobs, np.zeros(len(logprobs)), np.ones(len(logprobs))), bound=0.04)
        assert not found.chosen.any()
        assert found.metrics == {"train/m2": 0.0, "train/m2_kept": 0.0}


def test_a_covariance_is_the_mean_of_its_parts() -> None:
    tokens = drawn(3)
    want = np.cov(tokens.logprobs, tokens.advantages, bias=True)[0, 1]
    assert covariances(tokens).mean() == pytest.approx(want)
    for asked, mean in ((tokens, want), (tokens_of(np.zeros(0), np.zeros(0), np.zeros(0)), 0.0)):
        for found in (clip_cov(asked, fraction=0.1, low=0.0, high=1.0), kl_cov(asked, fraction=0.1)):
            assert found.metrics == {"train/cov": pytest.approx(mean)}
    # Equation 10, by hand: means -2 and 1.
    tokens = tokens_of(np.array([-1.0, -4.0, -1.0]), np.zeros(3), np.array([2.0, 1.0, 0.0]))
    assert covariances(tokens).tolist() == [1.0, 0.0, -1.0]


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.34, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_takes_the_highest(seed: int, fraction: float) -> None:
    """Equation 13: rank at most k N."""
    tokens = drawn(seed)
    found = covariances(tokens)
    ranks = [1 + sum(other > one or (other == one and j < i) for j, other in enumerate(found)) for i, one in enumerate(found)]
    chosen = kl_cov(tokens, fraction=fraction).chosen
    assert chosen.tolist() == [rank <= fraction * len(found) for rank in ranks]
    assert int(chosen.sum()) == math.floor(fraction * 60)


def test_clip_cov_draws_from_those_within_the_bounds_evenly() -> None:
    """Equation 11: floor(r N) of them, whichever of the candidates; where fewer are, all."""
    tokens = drawn(1, size=200)
    found = covariances(tokens)
    low, high = np.sort(found)[[120, 160]]
    inside = (found >= low) & (found <= high)
    assert inside[found == low].any()
    times, rng = np.zeros(200), np.random.default_rng(5)
    for _ in range(400):
        chosen = clip_cov(tokens._replace(draws=rng.random(200)), fraction=0.052, low=float(low), high=float(high)).chosen
        assert int(chosen.sum()) == 10
        assert not chosen[~inside].any()
        times += chosen
    # Each of some 40 candidates 100 times of 400 on average; a binomial's deviation is below 9.
    assert np.abs(times[inside] - 4000 / inside.sum()).max() < 50
    assert clip_cov(tokens, fraction=0.9, low=float(low), high=float(high)).chosen.tolist() == inside.tolist()


def test_what_is_drawn_hangs_on_version_step_and_place_alone(batch: TrainBatch) -> None:
    loss = LossConfig(policy="clip_cov", clip_cov_fraction=0.5, clip_cov_low=-10.0, clip_cov_high=10.0)

    def chosen(batch: TrainBatch, step: int = 0) -> list[bool]:
        every = np.ones(batch.num_tokens)
        found = decide(batch, loss, every * batch.loss_mask, every > 0, logprobs=-every, entropies=every, advantages=every, step=step)
        assert found.chosen is not None
        return found.chosen.tolist()

    first = chosen(batch)
    assert sum(first) == 4
    assert chosen(batch) == first
    later = [chosen(batch, step) for step in range(1, 6)]
    others = [chosen(msgspec.structs.replace(batch, version=Version(0, number))) for number in range(1, 6)]
    assert any(one != first for one in later)
    assert any(one != first for one in others)
    assert later != others


def test_the_highest_entropies_are_that_part_of_all_with_what_is_equal_to_the_last() -> None:
    entropies = np.array([0.1, 2.0, 0.5, 0.5, 3.0])
    for fraction, want in ((0.2, {4}), (0.21, {1, 4}), (0.4, {1, 4}), (0.5, {1, 2, 3, 4}), (1.0, {0, 1, 2, 3, 4})):
        kept, threshold = highest_entropies(entropies, fraction)
        assert set(np.flatnonzero(kept).tolist()) == want
        assert threshold == entropies[kept].min()
    assert highest_entropies(np.zeros(0), 0.2) == (pytest.approx(np.zeros(0)), 0.0)


@pytest.fixture
def batch(make_batch: Callable[..., TrainBatch]) -> TrainBatch:
    return make_batch([{"prompt": [1], "answer": [2] * 4, "task": 0, "rollout": k} for k in range(2)])


def test_top_entropy_makes_the_mean_one_over_the_tokens_that_are_left(batch: TrainBatch) -> None:
    """Equation 6 of arXiv 2506.01939: with token_mean, a sum over the kept tokens by their number."""
    entropies = np.array([9.0, 0.1, 0.2, 0.3, 0.4, 9.0, 0.5, 0.6, 0.7, np.nan])
    weights = batch.loss_mask / 8.0
    every = np.ones(batch.num_tokens)
    found = decide(batch, LossConfig(top_entropy=0.4), weights, every > 0, logprobs=-every, entropies=entropies, advantages=every, step=0)
    assert found.chosen is None and found.share is not None
    # Of 7 tokens with an entropy 3; the prompts' are not asked about, and one that is not finite does not count.
    assert (found.share * weights).tolist() == pytest.approx([0, 0, 0, 0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0])
    assert found.metrics == {"train/top_entropy_threshold": 0.5, "train/top_entropy_fraction": pytest.approx(3 / 7)}
    nothing = decide(batch, LossConfig(top_entropy=0.4), weights, every < 0, logprobs=-every, entropies=entropies, advantages=every, step=0)
    assert nothing.share is not None and not nothing.share.any()


def test_a_choice_is_of_the_tokens_it_was_asked_about_and_of_finite_ones(batch: TrainBatch) -> None:
    """Whatever stands elsewhere, NaN included, counts neither in the mean nor among what is left out."""
    loss = LossConfig(policy="m2po", m2po_bound=0.3)
    logprobs = batch.sampler_logprobs.astype(np.float64) + 1.0
    every = np.ones(batch.num_tokens)
    advantages, usable = every.copy(), every > 0
    near, others = np.array([1, 2, 6]), np.array([3, 4, 7, 8])
    logprobs[near] -= [0.9, 0.5, 0.7]
    weights = np.zeros(batch.num_tokens)

    def ask() -> tuple[list[int], dict[str, float]]:
        found = decide(batch, loss, weights, usable, logprobs=logprobs, entropies=every * np.nan, advantages=advantages, step=0)
        assert found.chosen is not None and found.share is None
        return np.flatnonzero(found.chosen).tolist(), found.metrics

    weights[near] = 1.0
    want = ask()
    # Squares 0.01, 0.25 and 0.09 have a mean of 0.117 with all three.
    assert want == ([], {"train/m2": pytest.approx(0.35 / 3, rel=1e-6), "train/m2_kept": pytest.approx(0.35 / 3, rel=1e-6)})
    weights[others] = 1.0
    weights[9] = 1.0
    usable[9] = False
    logprobs[others[:2]], advantages[others[2]] = np.nan, np.inf
    batch.sampler_logprobs[others[3]] = -np.inf
    assert ask() == want
    logprobs[2] += 3.0
    assert ask()[0] == [2]


def test_of_a_single_token_all_counts_and_who_decides(batch: TrainBatch) -> None:
    every, loss = np.ones(batch.num_tokens), LossConfig(policy="kl_cov", kl_cov_fraction=1.0, top_entropy=0.5)
    weights = np.where(np.arange(batch.num_tokens) == 3, 0.25, 0.0)
    found = decide(batch, loss, weights, every > 0, logprobs=-every, entropies=every, advantages=every, step=0)
    assert found.chosen is not None and found.share is not None
    assert np.flatnonzero(found.chosen).tolist() == np.flatnonzero(found.share).tolist() == [3]
    assert found.share[3] == 1.0
    assert found.metrics == {"train/cov": 0.0, "train/top_entropy_threshold": 1.0, "train/top_entropy_fraction": 1.0}
    assert all(decides(LossConfig(policy=policy)) for policy in ("m2po", "clip_cov", "kl_cov"))
    assert decides(LossConfig(top_entropy=0.99))
    assert not decides(LossConfig())
    assert not decides(LossConfig(policy="mine.py:loss"))
