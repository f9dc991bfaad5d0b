"""The fold, rule by rule: assembly, ends, poison, credits, the warm-up. Age: test_fold_staleness.py; rewards: test_fold_rewards.py."""

import pytest

from streamrl.core.records import Poison, Rollouts
from streamrl.core.state import FoldConfig, initial_state
from streamrl.schemas.control import Grant
from streamrl.schemas.versions import Version
from tests.support.records import Stream, config, tasks_of, view


def test_a_batch_closes_at_b_groups_and_frees_their_credits() -> None:
    assert initial_state(config(3, 2)).grant == Grant(granted=9, version=0, retired=0, warmup_end=0, first_open=0)
    s = Stream(config())
    s.group(3)
    assert s.close() is None
    s.group(1)
    batch = s.close()
    assert tasks_of(batch) == (1, 3)
    assert batch is not None and batch.source == "main" and batch.sequences == (1, 2)
    s = Stream(config())
    s.group(1)
    s.group(3)
    s.train()
    assert s.state.version == Version(0, 1)
    assert (s.state.watermark, s.state.retired_above, s.state.retired, s.state.granted) == (0, frozenset({1, 3}), 2, 6)
    s.group(0)
    s.group(2)
    s.train()
    assert (s.state.watermark, s.state.retired_above) == (4, frozenset())


def test_records_at_or_below_the_cursor_change_nothing() -> None:
    s = Stream(config())
    s.group(0)
    before = s.state
    effects = s.put(Poison(1, 1, "an old one"))
    assert s.state is before and effects.dead == () and effects.grant is None


def test_a_partial_group_waits_and_holds_its_messages() -> None:
    s = Stream(config(1))
    s.rollouts(0, view(1, reward=1.0))
    s.mark()
    assert s.state.ready == 0 and s.close() is None
    assert s.state.cursor == 2 and s.state.oldest_needed == 1
    s.rollouts(0, view(0, reward=0.0))
    batch = s.close()
    assert batch is not None and batch.sequences == (1, 3)
    s.train()
    assert s.state.oldest_needed == 4


def test_a_repeated_rollout_is_dropped_and_the_first_counts() -> None:
    s = Stream(config(1))
    s.rollouts(0, view(0, reward=0.25))
    s.rollouts(0, view(0, reward=0.75), view(1, reward=1.0))
    assert s.dropped == [(2, 0, (0,), "duplicate", False)]
    batch = s.train()
    assert [(k, r.sequence, r.reward) for k, r in sorted(batch.groups[0].rollouts.items())] == [(0, 1, 0.25), (1, 2, 1.0)]


def test_what_comes_after_its_task_ended_is_late() -> None:
    s = Stream(config(1))
    s.group(0)
    s.train()
    s.group(0)
    s.end(0)
    s.end(0, 1)
    assert s.dropped == [(2, 0, (0, 1), "late", False), (3, 0, (), "late", False), (4, 0, (), "late", False)]
    assert s.state.retired == 1


def test_a_tombstone_or_poison_ends_a_task_with_what_had_come() -> None:
    s = Stream(config(2, 1))
    effects = s.end(1)
    assert s.dropped == [(1, 1, (), "failed", True)]
    assert effects.grant == Grant(granted=5, version=0, retired=1, warmup_end=0, first_open=0)
    assert s.state.drops[0].detail == "said the producer"
    s = Stream(config())
    s.rollouts(0, view(1, reward=1.0))
    s.end(0, reason="deliveries")
    assert s.dropped == [(1, 0, (1,), "deliveries", False), (2, 0, (), "deliveries", True)]
    assert s.state.pending == {} and s.state.watermark == 1
    s = Stream(config())
    s.end(0, 1)
    s.end(0)
    assert s.dropped == [(1, 0, (1,), "failed", False), (2, 0, (), "failed", True)]
    assert s.state.pending == {} and s.state.retired == 1
    s = Stream(config())
    s.end(0, 1)
    s.poison(0)
    assert s.dropped[-1] == (2, 0, (), "poison", True)
    assert s.state.pending == {} and s.state.retired == 1


def test_tombstones_of_rollouts_make_a_group_smaller_until_it_ends() -> None:
    s = Stream(config(1))
    s.rollouts(0, view(0, reward=0.0), view(2, reward=1.0), group=3)
    assert s.close() is None
    s.end(0, 1, group=3)
    assert s.dropped == [(2, 0, (1,), "failed", False)]
    batch = s.train()
    assert sorted(batch.groups[0].rollouts) == [0, 2]
    s = Stream(config())
    s.end(0, 0)
    s.end(0, 0)
    assert s.state.retired == 0 and s.dropped[-1] == (2, 0, (0,), "duplicate", False)
    s.end(0, 1)
    assert s.dropped[-1] == (3, 0, (1,), "failed", True)
    assert s.state.retired == 1 and s.state.pending == {}
    s = Stream(config())
    s.end(0, 0)
    s.rollouts(0, view(1, reward=1.0))
    assert s.dropped[-1] == (2, 0, (1,), "zero_variance", True)


@pytest.mark.parametrize("task", [None, 0, 99])
def test_poison_without_an_open_task_retires_nothing(task: int | None) -> None:
    s = Stream(config(1))
    s.group(0)
    s.train()
    effects = s.poison(task)
    assert len(effects.dead) == 1 and effects.grant is None
    assert s.dropped == [(2, -1 if task is None else task, (), "poison", False)]
    assert s.state.retired == 1


def test_what_cannot_be_is_poison() -> None:
    stream = Stream(FoldConfig(batch_tasks=2, max_staleness=1, vocab_size=104))
    views = (view(0, reward=0.0), view(1, reward=1.0))
    stream.put(Rollouts(stream.next(), "main", 0, 2, views, top_token=103))
    effects = stream.put(Rollouts(stream.next(), "main", 1, 2, views, top_token=104))
    assert [(letter.sequence, "below the model's 104" in letter.reason) for letter in effects.dead] == [(2, True)]
    assert 0 in stream.state.pending and stream.state.is_retired(1)
    s = Stream(config())
    effects = s.rollouts(0, view(0, oldest=0, highest=1, reward=1.0), view(1, reward=0.0))
    assert "version 1" in effects.dead[0].reason
    assert s.dropped == [(1, 0, (), "poison", True)]
    s = Stream(config(1, 0))
    effects = s.group(1)
    assert "had not been granted" in effects.dead[0].reason
    effects = s.end(1)
    assert "had not been granted" in effects.dead[0].reason
    assert [d[-2:] for d in s.dropped] == [("poison", False)] * 2
    s.group(0)
    s.train()
    s.group(1, oldest=1)
    assert tasks_of(s.close()) == (1,)
    s = Stream(config())
    s.rollouts(0, view(0, reward=1.0), group=4)
    effects = s.rollouts(0, view(1, reward=1.0), group=2)
    assert "group of 4" in effects.dead[0].reason and s.state.retired == 1
    s.rollouts(1, view(0, reward=1.0), group=2)
    effects = s.end(1, 5, group=8)
    assert "group of 2" in effects.dead[0].reason and s.state.retired == 2
    s = Stream(config())
    effects = s.demonstration(0)
    assert "not of the warm-up" in effects.dead[0].reason and s.state.retired == 1


def test_groups_without_spread_or_trained_tokens_are_dropped() -> None:
    s = Stream(config())
    effects = s.group(0, (1.0, 1.0))
    assert s.dropped == [(1, 0, (0, 1), "zero_variance", True)] and effects.grant is not None
    assert (s.state.reward_sum, s.state.reward_count) == (2.0, 2)
    kept = Stream(config(1, drop_zero_variance=False))
    kept.group(0, (1.0, 1.0))
    assert tasks_of(kept.close()) == (0,)
    s = Stream(config())
    s.rollouts(0, view(2, reward=1.0), group=3)
    s.rollouts(0, view(0, reward=1.0), view(1, reward=1.0), group=3)
    assert s.dropped == [(1, 0, (2,), "zero_variance", False), (2, 0, (0, 1), "zero_variance", True)]
    s = Stream(config())
    s.rollouts(0, view(0, oldest=-1, highest=0, tokens=0, reward=0.0), view(1, oldest=-1, highest=0, tokens=0, reward=1.0))
    assert s.dropped == [(1, 0, (0, 1), "empty", True)]


def test_a_grant_is_given_once_and_drops_go_to_the_next_entry() -> None:
    s = Stream(config())
    assert s.end(0).grant is not None
    assert s.mark().grant is None
    assert s.end(0).grant is None
    s = Stream(config(1))
    s.end(1)
    s.group(0)
    assert len(s.state.drops) == 1
    s.train()
    assert s.state.drops == () and s.state.reward_count == 0


def test_the_warm_up_ends_with_what_was_granted_and_trains_it_to_the_last() -> None:
    s = Stream(config(2, 1, warmup_steps=8))
    assert s.state.in_warmup(10**6)
    for task in range(4):
        s.demonstration(task)
    assert s.train(warm=False, score=0.5).source == "warmup"
    assert (s.state.warmup_end, s.state.warmup_score, s.state.granted) == (None, 0.5, 6)
    s.train(warm=True, score=1.0)
    assert s.state.warmup_end == 6 and s.state.warmup_score == pytest.approx(0.7 * 0.5 + 0.3)
    assert s.state.grant == Grant(granted=8, version=2, retired=4, warmup_end=6, first_open=4)
    for task in (6, 7):
        s.group(task, oldest=2)
    assert s.close() is None, "two main groups are ready, but two tasks of the warm-up are open"
    s.demonstration(5)
    assert s.close() is None
    s.end(4)
    assert tasks_of(s.train()) == (5,), "the last batch of the warm-up is short"
    assert (s.state.warmup_steps, s.state.steps) == (3, 0)
    assert s.train().source == "main"
    assert (s.state.warmup_steps, s.state.steps) == (3, 1)
