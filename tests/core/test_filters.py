"""The built-in filters: lengths, repetition and rewards of groups, against a plain reading of what they say."""

import itertools
import random
import statistics
from collections import Counter
from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.config.filters import FiltersConfig
from streamrl.core.assembly import assemble
from streamrl.core.fold import close
from streamrl.core.pass_rates import Estimate, estimates, majority_at, majority_ks, pass_at, powers
from streamrl.core.records import Rollouts, judge
from streamrl.core.repetition import Tails, repetition
from streamrl.core.state import FoldConfig, FoldState, initial_state
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.samples import Sample, VersionSpan
from streamrl.schemas.versions import Version
from tests.support.records import Stream, config, view
from tests.support.rows import sample


def rules(batch: int = 1, staleness: int = 4, *, zero_variance: bool = False, **filters: Any) -> FoldConfig:
    return config(batch, staleness, drop_zero_variance=zero_variance, filters=replace(FiltersConfig(min_reward_std=0.0), **filters))


def answer(rollout: int, tokens: list[int], **values: Any) -> Sample:
    """One of the prompt's two tokens, and these."""
    size = 2 + len(tokens)
    mask = np.array([0, 0] + [1] * len(tokens), np.uint8)
    return sample(
        rollout,
        tokens=np.array([5, 6, *tokens], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        spans=(VersionSpan(2, None), VersionSpan(size - 2, Version(0, 0))),
        **values,
    )


def judged(*rows: Sample) -> tuple[Rollouts, SampleBatch]:
    record, batch = judge("run.samples.main", 1, encode_samples(rows), None)
    assert isinstance(record, Rollouts) and batch is not None
    return record, batch


def seen_before(tokens: list[int], n: int) -> float:
    grams = [tuple(tokens[k : k + n]) for k in range(len(tokens) - n + 1)]
    return sum(gram in grams[:k] for k, gram in enumerate(grams)) / len(grams) if len(grams) > 1 else 0.0


@given(st.lists(st.integers(0, 4) | st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 12))
def test_repetition_is_the_part_of_ngrams_that_were_there_before(tokens: list[int], n: int) -> None:
    assert repetition(np.array(tokens, np.int32), n) == pytest.approx(seen_before(tokens, n), abs=1e-12)


def test_repetition_of_the_worst_samples_end_counts() -> None:
    assert repetition(np.arange(1000), 4) == 0.0
    assert repetition(np.tile(np.arange(7), 100), 8) == 1 - 7 / (700 - 7)
    assert repetition(np.zeros(0, np.int32), 3) == repetition(np.array([1]), 1) == 0.0
    walk, loop = list(range(10, 40)), [7, 8] * 15
    _, batch = judged(
        answer(0, [*walk, *loop], num_samples=2), answer(0, walk, sample=1, num_samples=2), answer(1, [*loop, *walk], group_size=2)
    )
    tails = Tails(batch)
    assert tails.repetition(2, 30) == {0: pytest.approx(27 / 29), 1: 0.0}
    assert tails.repetition(2, 1000)[1] == pytest.approx(seen_before([*loop, *walk], 2))
    assert tails.settled().repetition(2, 30)[1] == 0.0
    with pytest.raises(AssertionError):
        tails.repetition(3, 30)


@pytest.mark.parametrize(("length", "reason"), [(2, "too_short"), (3, ""), (5, ""), (6, "too_long")])
def test_lengths_are_bounded_and_the_bounds_are_included(length: int, reason: str) -> None:
    s = Stream(rules(min_tokens=3, max_tokens=5))
    s.rollouts(0, view(0, reward=1.0, tokens=length), view(1, reward=0.0, tokens=4))
    assert [(d[2], d[3]) for d in s.dropped] == ([((0,), reason)] if reason else [])
    assert sorted(s.train().groups[0].rollouts) == ([1] if reason else [0, 1])


def test_refused_rollouts_leave_their_group_and_a_group_of_them_frees_its_credit() -> None:
    record, _ = judged(answer(0, [7] * 20), answer(1, list(range(20))))
    s = Stream(rules(max_repetition=0.5, repetition_ngram=3), replace(initial_state(rules()), granted=9))
    s.put(record)
    assert s.dropped == [(1, 3, (0,), "repetitive", False)]
    s = Stream(rules(max_repetition=0.95, repetition_ngram=3), replace(initial_state(rules()), granted=9))
    s.put(record)
    assert not s.dropped, "17 of 18 3-grams are less than that"
    s = Stream(rules(min_tokens=5))
    before = s.state.granted
    effects = s.rollouts(0, view(0, reward=1.0), view(1, reward=0.0))
    assert s.dropped == [(1, 0, (0, 1), "too_short", True)] and not s.state.pending
    assert s.state.retired == 1 and effects.grant is not None and effects.grant.granted == before + 1


def test_masked_rollouts_still_count_in_their_group() -> None:
    config = rules(refused="mask", max_tokens=3)
    rows = [answer(0, [7, 8, 9, 7], reward=1.0), answer(1, [7], reward=0.0)]
    record, batch = judged(*rows)
    s = Stream(config, replace(initial_state(config), granted=9))
    s.put(record)
    closed = s.close()
    assert closed is not None and not s.dropped and sorted(closed.groups[0].rollouts) == [0, 1]
    given_to = assemble(closed, {1: batch}, s.state, config)
    assert given_to.rewards.tolist() == [1.0, 0.0], "the reward counts"
    assert np.add.reduceat(given_to.loss_mask, given_to.offsets[:-1], dtype=int).tolist() == [0, 1]
    assert s.state.pending[3].rollouts[0].length == 4, "it was sampled all the same"
    s.sequence = 1
    s.rollouts(4, view(0, reward=1.0, tokens=9), view(1, reward=0.0, tokens=9))
    assert s.dropped[-1][3:] == ("empty", True)


def test_demonstrations_are_left_alone() -> None:
    config = rules(min_tokens=100, max_repetition=0.01, mean_reward=(5.0, 6.0))
    s = Stream(replace(config, warmup_steps=3))
    s.demonstration(0)
    assert not s.dropped and s.train(warm=False).groups[0].task == 0


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((0.0, 0.0, 1.0, 0.0), "too_hard"), ((1.0, 1.0, 0.0, 1.0), ""), ((0.5, 0.5, 0.5, 0.5), ""), ((1.0, 1.0, 1.0, 0.9), "too_easy")],
)
def test_groups_whose_mean_reward_is_beyond_the_bounds_are_dropped(rewards: tuple[float, ...], reason: str) -> None:
    s = Stream(rules(mean_reward=(0.5, 0.75)))
    s.group(0, rewards)
    assert [d[3:] for d in s.dropped] == ([(reason, True)] if reason else [])
    assert s.state.retired == bool(reason)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.sampled_from([0.0, 1e-6, 0.5, 2.0]))
def test_zero_variance_is_a_small_deviation(rewards: list[float], bound: float) -> None:
    s = Stream(rules(zero_variance=True, min_reward_std=bound))
    s.group(0, rewards)
    deviation = statistics.stdev(rewards)
    if deviation < bound * (1 - 1e-9) or len(set(rewards)) == 1:
        assert [d[3] for d in s.dropped] == ["zero_variance"]
    elif deviation > bound * (1 + 1e-9) or bound == 0:
        assert not s.dropped


def test_noise_is_no_variance_and_a_correction_may_refuse_a_group() -> None:
    """slime's bound: std > 1e-6 in float64."""
    noisy = (0.1 + 0.2, 0.3, 0.3)
    assert noisy[0] != noisy[1]
    for bound, dropped in ((0.0, False), (1e-6, True)):
        s = Stream(rules(zero_variance=True, min_reward_std=bound))
        s.group(0, noisy)
        assert bool(s.dropped) == dropped
    s = Stream(rules(zero_variance=False, min_reward_std=1.0))
    s.group(0, noisy)
    assert not s.dropped
    s = Stream(rules(2, mean_reward=(0.4, 0.6)))
    s.group(0, (0.0, 1.0))
    s.reward(0, 0, 1.0)
    assert s.dropped == [(1, 0, (0, 1), "too_easy", True)] and s.state.retired == 1


@given(st.permutations([0.1, 0.2, 0.3, 0.7, 1e-17]))
def test_the_order_of_rewards_decides_nothing(rewards: list[float]) -> None:
    mean = statistics.fmean([0.1, 0.2, 0.3, 0.7, 1e-17])
    for bounds, drops in (((mean, mean), False), ((np.nextafter(mean, 1), 1.0), True)):
        s = Stream(rules(mean_reward=tuple(map(float, bounds))))
        for rollout, reward in enumerate(rewards):
            s.rollouts(0, view(rollout, reward=reward), group=5)
        assert bool(s.dropped) == drops


messages = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 8), st.floats(0, 1)), min_size=1, max_size=30, unique_by=lambda m: m[:2]
)


@given(messages, st.integers(0, 4), st.integers(3, 8), st.sampled_from(["drop", "mask"]), st.booleans())
def test_each_task_ends_once(sent: list[tuple[int, int, int, float]], shortest: int, longest: int, refused: str, flat: bool) -> None:
    """What retires is counted once, what is trained is within the bounds, and a state that was stored goes on alike."""
    config = rules(1, 9, zero_variance=flat, min_tokens=shortest, max_tokens=longest, refused=refused, mean_reward=(0.2, 0.8))
    s = Stream(config)
    stored: FoldState | None = None
    for place, (task, rollout, tokens, reward) in enumerate(sent):
        s.rollouts(task, view(rollout, tokens=tokens, reward=reward, oldest=0 if tokens else -1), group=3)
        if place == len(sent) // 2:
            stored = FoldState.decode(s.state.encode())
    ended = {task: sum(1 for t, *_ in sent if t == task) == 3 for task in {m[0] for m in sent}}
    retires = [d.task for d in s.state.drops if d.retires]
    assert len(retires) == len(set(retires)) == s.state.retired
    assert s.state.granted == initial_state(config).granted + s.state.retired
    for task, whole in ended.items():
        if whole:
            assert s.state.is_retired(task) != (task in s.state.pending and s.state.pending[task].ready)
    assert stored is not None
    again = Stream(config, stored)
    for task, rollout, tokens, reward in sent[len(sent) // 2 + 1 :]:
        again.rollouts(task, view(rollout, tokens=tokens, reward=reward, oldest=0 if tokens else -1), group=3)
    assert again.state == s.state
    if (batch := close(s.state, config)) is not None:
        (group,) = batch.groups
        rewards = [one.reward for one in group.rollouts.values() if one.reward is not None]
        assert 0.2 <= statistics.fmean(rewards) <= 0.8
        trained = [one for one in group.rollouts.values() if one.num_tokens]
        assert trained and all(shortest <= one.num_tokens <= longest for one in trained)


def test_a_verdict_is_a_tombstone_and_one_that_comes_too_late_or_twice_changes_nothing() -> None:
    s = Stream(rules(1))
    s.rollouts(0, view(0, reward=1.0), group=2)
    s.end(0, 1, reason="filter: dull")
    assert s.dropped == [(2, 0, (1,), "filter: dull", False)]
    s.end(0, 0, reason="filter: forged")
    assert s.dropped[-1] == (3, 0, (0,), "duplicate", False), "a rollout that came stays"
    assert sorted(s.train().groups[0].rollouts) == [0]
    before = s.state.granted
    for rollout in (None, 0, 1):
        s.end(0, rollout, reason="filter: forged")
    assert [d[3] for d in s.dropped] == ["late"] * 3 and s.state.granted == before
    effects = s.end(1, reason="filter: dull")
    assert s.dropped[-1] == (7, 1, (), "filter: dull", True) and effects.grant is not None
    assert s.end(99, reason="filter: forged").dead, "of a task that nobody was granted"


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


def test_the_majority_is_that_of_every_choice_and_a_tie_is_worth_its_mean() -> None:
    generator = random.Random(7)
    for _ in range(60):
        n = generator.randint(1, 8)
        answers = [generator.choice(["a", "b", "c", "d", None]) for _ in range(n)]
        rewards = [generator.choice([0.0, 1.0, 0.5]) for _ in range(n)]
        for k in range(1, n + 1):
            assert majority_at(answers, rewards, [k]) == pytest.approx([float(enumerated(answers, rewards, k))], abs=1e-12)
    assert majority_at(["7", "8"], [1.0, 0.0], [2, 1]) == [0.5, 0.5]
    assert majority_at(["7", "7", "8"], [1.0, 1.0, 0.0], [3]) == [1.0]
    assert majority_at([None, None], [0.0, 0.0], [2]) == [0.0]
    assert np.isnan(majority_at(["7"], [1.0], [2])).all()
    assert [majority_ks(n) for n in (1, 2, 6, 16, 64)] == [(), (2,), (2, 4, 6), (2, 4, 8, 16), (64,)]


def test_an_interval_covers_as_often_as_it_says_is_seeded_and_leaves_out_who_has_no_value() -> None:
    """Of 400 sets of 200 problems, each right with probability 0.3: 95 % +- 3.3 % (three standard errors of a share of 400)."""
    found = estimates((np.random.default_rng(3).random((200, 400)) < 0.3).astype(np.float64))
    inside = sum(one is not None and one.low <= 0.3 <= one.high for one in found)
    assert 0.917 <= inside / 400 <= 0.983
    values = np.array([[1.0, np.nan], [0.0, np.nan], [np.nan, np.nan]])
    assert estimates(values, seed=5) == estimates(values, seed=5)
    first, second = estimates(values)
    assert first == Estimate(0.5, 0.0, 1.0, 2)
    assert second is None
    assert estimates(np.empty((0, 1))) == [None]
