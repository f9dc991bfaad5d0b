from __future__ import annotations

import itertools
import random
from collections import Counter
from fractions import Fraction
from math import comb

import numpy as np
import pytest

from streamrl.core.pass_rates import Estimate, estimates, majority_at, majority_ks, pass_at, powers


def test_pass_at_k_of_the_published_example_and_of_too_few_answers() -> None:
    """slime's golden numbers: [1,0,0,0] and [1,1,0,0]."""
    assert [round(float(np.mean(pass_at([4, 4], [1, 2], k))), 4) for k in powers(4)] == [0.375, 0.6667, 1.0]
    found = pass_at([4, 3, 0], [1, 3, 0], 4)
    assert found[0] == 1.0
    assert np.isnan(found[1:]).all()


@pytest.mark.parametrize("n", [1, 2, 5, 16, 64, 1000])
def test_pass_at_k_is_one_minus_a_quotient_of_binomials(n: int) -> None:
    correct = [*range(min(n, 20) + 1), n]
    for k in powers(n):
        exact = [float(1 - Fraction(comb(n - c, k), comb(n, k))) for c in correct]
        np.testing.assert_allclose(pass_at([n] * len(correct), correct, k), exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("answered", "correct", "k"), [([4], [5], 1), ([4], [-1], 1), ([4], [1], 0)])
def test_impossible_counts_are_refused(answered: list[int], correct: list[int], k: int) -> None:
    with pytest.raises(ValueError, match="expected k >= 1"):
        pass_at(answered, correct, k)


def enumerated(answers: list[str | None], rewards: list[float], k: int) -> Fraction:
    """maj@k by going through every choice of k samples."""
    sums: dict[str, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            sums.setdefault(answer, []).append(reward)
    worth = {answer: Fraction(sum(map(Fraction, values))) / len(values) for answer, values in sums.items()}
    total = Fraction(0)
    for chosen in itertools.combinations(answers, k):
        votes = Counter(answer for answer in chosen if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        total += sum((worth[answer] for answer in winners), Fraction(0)) / max(1, len(winners))
    return total / comb(len(answers), k)


def test_the_majority_is_that_of_every_choice() -> None:
    generator = random.Random(7)
    for _ in range(60):
        n = generator.randint(1, 8)
        answers = [generator.choice(["a", "b", "c", "d", None]) for _ in range(n)]
        rewards = [generator.choice([0.0, 1.0, 0.5]) for _ in range(n)]
        for k in range(1, n + 1):
            assert majority_at(answers, rewards, [k]) == pytest.approx([float(enumerated(answers, rewards, k))], abs=1e-12)


def test_a_tie_is_worth_its_mean_and_there_is_a_majority_for_some_k() -> None:
    assert majority_at(["7", "8"], [1.0, 0.0], [2, 1]) == [0.5, 0.5]
    assert majority_at(["7", "7", "8"], [1.0, 1.0, 0.0], [3]) == [1.0]
    assert majority_at([None, None], [0.0, 0.0], [2]) == [0.0]
    assert np.isnan(majority_at(["7"], [1.0], [2])).all()
    assert [majority_ks(n) for n in (1, 2, 6, 16, 64)] == [(), (2,), (2, 4, 6), (2, 4, 8, 16), (64,)]


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Of 400 sets of 200 problems, each right with probability 0.3: 95 % +- 3.3 % (three standard errors of a share of 400)."""
    found = estimates((np.random.default_rng(3).random((200, 400)) < 0.3).astype(np.float64))
    inside = sum(one is not None and one.low <= 0.3 <= one.high for one in found)
    assert 0.917 <= inside / 400 <= 0.983


def test_an_interval_is_seeded_and_leaves_out_who_has_no_value() -> None:
    values = np.array([[1.0, np.nan], [0.0, np.nan], [np.nan, np.nan]])
    assert estimates(values, seed=5) == estimates(values, seed=5)
    first, second = estimates(values)
    assert first == Estimate(0.5, 0.0, 1.0, 2)
    assert second is None
    assert estimates(np.empty((0, 1))) == [None]
