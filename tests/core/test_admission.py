"""Limits of the model, guessed versions and truncated samples: what of a message is trained."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.core.assembly import assemble
from streamrl.core.batches import STATUS_CODES
from streamrl.core.fold import fold
from streamrl.core.records import Poison, Rollouts, Share, judge
from streamrl.core.state import initial_state
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import Sample, Status, TurnSpan, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.support.records import Stream, config, tasks_of, view
from tests.support.rows import sample

GUESSED = (TurnSpan(start=2, length=2, inexact=True),)
CUT: dict[str, Any] = {"status": Status.TRUNCATED, "finish_reason": "length"}


def judged(*rows: Sample) -> Rollouts:
    record, _ = judge("run.samples.main", 1, encode_samples(rows), None)
    assert isinstance(record, Rollouts)
    return record


def doubtful(rollout: int, *, inexact: bool = False, truncated: bool = False, reward: float = 0.0, old: int = 0) -> Any:
    shares = (Share(False, False, 1, 0, 0), Share(inexact, truncated, 2, old, old))
    return replace(view(rollout, reward=reward, tokens=3), shares=shares)


def test_trained_tokens_are_shared_out_by_what_may_be_doubted() -> None:
    spans = (VersionSpan(2, None), VersionSpan(1, Version(0, 4)), VersionSpan(1, Version(0, 6)))
    turns = (TurnSpan(start=2, length=1), TurnSpan(start=3, length=1, inexact=True))
    record = judged(sample(0, spans=spans, turns=turns), sample(1))
    mixed, plain = record.rollouts
    assert mixed.shares == (Share(False, False, 1, 4, 4), Share(True, False, 1, 6, 6))
    assert (mixed.num_tokens, mixed.oldest, mixed.newest, mixed.inexact, mixed.truncated) == (2, 4, 6, True, False)
    assert plain.shares == () and plain.without(inexact=True, truncated=True) is plain
    exact = mixed.without(inexact=True, truncated=False)
    assert (exact.num_tokens, exact.oldest, exact.newest) == (1, 4, 4)
    (cut,) = judged(sample(0, turns=turns, spans=spans, **CUT)).rollouts
    assert [(share.inexact, share.truncated) for share in cut.shares] == [(False, True), (True, True)]
    nothing = cut.without(inexact=False, truncated=True)
    assert (nothing.num_tokens, nothing.oldest, nothing.newest, nothing.demonstration) == (0, -1, -1, False)
    turns = (TurnSpan(start=2, length=1), TurnSpan(start=3, length=1, inexact=True))
    (one,) = judged(sample(0, turns=turns)).rollouts
    assert one.shares == (Share(False, False, 1, 4, 4), Share(True, False, 1, 4, 4))
    masked = np.array([0, 0, 0, 1], np.uint8)
    turns = (TurnSpan(start=2, length=1, inexact=True), TurnSpan(start=3, length=1))
    assert judged(sample(0, turns=turns, loss_mask=masked)).rollouts[0].shares == ()


UNKNOWN = [
    *({"temperature": t} for t in (0, -1.0, 1e-40, 1e300, 10**400, True, "0.5")),
    *({"top_p": 0.0}, {"min_p": 2}, {"stop": [3]}, {"logit_bias": {"a": 1.0}}, {"temperature": 0.5, "min_q": 0.1}),
    *({"presence_penalty": 0.5}, {"regex": "a"}),  # whose distributions no trainer computes, and which are not marked as inexact
]


@pytest.mark.parametrize("sampling", UNKNOWN, ids=str)
def test_sampling_by_turn_is_not_trained_as_if_it_were_the_samples(sampling: dict[str, Any]) -> None:
    rows = [sample(0, turns=(TurnSpan(start=2, length=1), TurnSpan(start=3, length=1, sampling=sampling)))]
    record, batch = judge("run.samples.main", 1, encode_samples(rows), "3")
    assert isinstance(record, Poison) and record.task == 3 and batch is None


def test_what_a_turn_is_drawn_with_is_its_own() -> None:
    turns = (TurnSpan(start=2, length=1), TurnSpan(start=3, length=1, sampling={"temperature": 0.5}))
    record, batch = judge("run.samples.main", 1, encode_samples([sample(0), sample(1, turns=turns)]), "3")
    assert isinstance(record, Rollouts) and batch is not None
    assert batch.drawn_at("temperature").tolist() == [1, 1, 1, 1, 1, 1, 1, 0.5] and batch.drawn_at("temperature").dtype == np.float32
    own = {"top_p": 0.5, "min_p": 0.25, "top_k": 3, "logit_bias": {"7": -1.0}, "stop": ["a"]}
    turns = (TurnSpan(start=2, length=1), TurnSpan(start=3, length=1, sampling=own))
    rows = [sample(0, sampling=Sampling(min_p=0.5, logit_bias={6: 2.0})), sample(1, turns=turns)]
    record, batch = judge("run.samples.main", 1, encode_samples(rows), "3")
    assert isinstance(record, Rollouts) and batch is not None
    assert batch.drawn_at("min_p").tolist() == [0.5] * 4 + [0, 0, 0, 0.25] and batch.drawn_at("min_p").dtype == np.float32
    assert batch.drawn_at("top_p").tolist() == [1] * 7 + [0.5] and batch.drawn_at("top_k").tolist() == [-1] * 7 + [3]
    places, biases = batch.logit_biases
    assert places.tolist() == [0] * 4 + [-1, -1, -1, 1] and biases == ({6: 2.0}, {7: -1.0})


def test_a_penalty_or_a_grammar_is_marked_as_inexact_or_refused() -> None:
    drawn, marked = Sampling(regex="a"), (TurnSpan(start=2, length=2, inexact=True),)
    exact = (TurnSpan(start=2, length=2, sampling={"regex": ""}),)
    assert isinstance(judge("run.samples.main", 1, encode_samples([sample(0, sampling=drawn)]), "3")[0], Poison)
    assert judged(sample(0, sampling=drawn, turns=marked)).rollouts[0].inexact
    assert not judged(sample(0, sampling=drawn, turns=exact)).rollouts[0].inexact
    both = (TurnSpan(start=2, length=2, inexact=True, sampling={"json_schema": "{}"}),)
    assert isinstance(judge("run.samples.main", 1, encode_samples([sample(0, sampling=drawn, turns=both)]), "3")[0], Poison)


def test_a_sample_beyond_the_longest_sequence_is_a_dead_letter() -> None:
    long = judged(sample(0), sample(1))
    state = replace(initial_state(config(4, 9)), version=Version(0, 7))
    for longest, dead in ((0, False), (4, False), (3, True)):
        after, effects = fold(state, long, config(4, 9, max_len=longest))
        assert bool(effects.dead) == dead == after.is_retired(3)
    (letter,) = effects.dead
    assert letter.task == 3 and after.drops[-1].retires and "of 4" in letter.reason


@pytest.mark.parametrize(("key", "doubt", "reason"), [("inexact", "inexact", "inexact"), ("overlong", "truncated", "truncated")])
def test_refused_rollouts_leave_their_group(key: str, doubt: str, reason: str) -> None:
    word = {"inexact": "refuse", "overlong": "drop"}[key]
    s = Stream(config(1, 4, **{key: word}))
    s.rollouts(0, view(0, reward=0.0), doubtful(1, reward=1.0, **{doubt: True}), view(2, reward=1.0), group=3)
    assert s.dropped == [(1, 0, (1,), reason, False)]
    batch = s.train()
    assert tasks_of(batch) == (0,) and sorted(batch.groups[0].rollouts) == [0, 2]
    s.rollouts(1, doubtful(0, **{doubt: True}))
    s.rollouts(1, doubtful(1, **{doubt: True}))
    assert [(d[2:]) for d in s.dropped] == [((0,), reason, False), ((1,), reason, True)]
    assert s.state.is_retired(1) and not s.state.pending
    s.rollouts(2, doubtful(0, **{doubt: True}))
    s.rollouts(2, doubtful(0, **{doubt: True}))
    s.reward(2, 0, 1.0)
    assert [d[3] for d in s.dropped[2:]] == [reason, "duplicate", "superseded_reward"]


def test_both_reasons_retire_once_and_off_is_as_it_was() -> None:
    s = Stream(config(1, 4, inexact="refuse", overlong="drop"))
    s.rollouts(0, doubtful(0, truncated=True), doubtful(1, inexact=True))
    assert s.dropped == [(1, 0, (1,), "inexact", False), (1, 0, (0,), "truncated", True)]
    assert s.state.retired == 1
    s.rollouts(1, doubtful(0, truncated=True), doubtful(1, inexact=True), doubtful(2, truncated=True), group=4)
    assert s.state.pending[1].ended == (0, 1, 2)
    s = Stream(config(1, 4))
    s.rollouts(0, doubtful(0, inexact=True, reward=0.0), doubtful(1, truncated=True, reward=1.0))
    assert {k: r.num_tokens for k, r in s.train().groups[0].rollouts.items()} == {0: 3, 1: 3}


@pytest.mark.parametrize(("vocabulary", "dead"), [(0, False), (9, False), (8, True)])
def test_token_ids_at_or_above_the_vocabulary_are_a_dead_letter(vocabulary: int, dead: bool) -> None:
    record = judged(sample(0), sample(1))
    rules = config(4, 9, vocab_size=vocabulary)
    _, effects = fold(replace(initial_state(rules), version=Version(0, 7)), record, rules)
    assert record.top_token == 8 and bool(effects.dead) == dead


@pytest.mark.parametrize(("key", "doubt"), [("inexact", "inexact"), ("overlong", "truncated")])
def test_masked_tokens_count_neither_as_trained_nor_as_old(key: str, doubt: str) -> None:
    s = Stream(config(1, 1, **{key: "mask"}), replace(initial_state(config(1, 1)), version=Version(0, 5)))
    s.rollouts(0, replace(doubtful(0, reward=1.0, **{doubt: True}, old=0), oldest=0), doubtful(1, reward=0.0), group=2)
    assert s.dropped[0][3] == "stale", "the untouched rollout is of version 0"
    shares = (Share(False, False, 1, 5, 5), Share(doubt == "inexact", doubt == "truncated", 2, 0, 0))
    mixed = replace(view(0, oldest=0, newest=5, reward=1.0), shares=shares)
    s.rollouts(1, mixed, view(1, oldest=5, reward=0.0))
    kept = s.train().groups[0].rollouts[0]
    assert (kept.num_tokens, kept.oldest, kept.newest) == (1, 5, 5)
    whole = (Share(doubt == "inexact", doubt == "truncated", 3, 6, 6),)
    s.rollouts(2, *(replace(view(k, oldest=6, reward=float(k)), shares=whole) for k in range(2)))
    assert s.dropped[-1][3:] == ("empty", True)


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        ({}, [2, 2, 2]),
        ({"inexact": "mask"}, [2, 2, 0]),
        ({"overlong": "mask"}, [2, 0, 2]),
        ({"overlong": "mask", "inexact": "mask"}, [2, 0, 0]),
    ],
)
def test_the_trainer_is_given_the_same_mask(words: dict[str, str], trained: list[int]) -> None:
    rules = config(1, 9, **words)
    rows = [sample(k, group_size=3, **more) for k, more in enumerate([{}, CUT, {"turns": GUESSED}])]
    record, decoded = judge("run.samples.main", 1, encode_samples(rows), None)
    state = replace(initial_state(rules), version=Version(0, 7), granted=9)
    s = Stream(rules, state)
    s.put(record)
    batch = s.close()
    assert batch is not None and decoded is not None
    given = assemble(batch, {1: decoded}, s.state, rules)
    assert np.add.reduceat(given.loss_mask, given.offsets[:-1], dtype=int).tolist() == trained
    assert [r.num_tokens for _, r in sorted(batch.groups[0].rollouts.items())] == trained
    assert given.status.tolist() == [STATUS_CODES[status] for status in (Status.COMPLETED, Status.TRUNCATED, Status.COMPLETED)]
    assert given.rewards.tolist() == [0.0, 1.0, 2.0]
