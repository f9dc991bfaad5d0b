"""The greedy rollout of a task in the fold: a reward to compare with, never tokens to train; and groups that lack it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.config.filters import FiltersConfig
from streamrl.core.assembly import used
from streamrl.core.records import RolloutView
from streamrl.core.state import FoldConfig, FoldState, initial_state
from streamrl.schemas.ledger import Used
from streamrl.schemas.versions import Version
from tests.core.test_fold_agents import only_agents, with_agents
from tests.support.records import Stream, config, tasks_of, view


def greedy(rollout: int, reward: float | None = None, *, highest: int = 0) -> RolloutView:
    """As `judge` makes it of samples with a mask of zeros."""
    return view(rollout, oldest=-1, highest=highest, reward=reward, tokens=0)


def remax(batch: int = 1, size: int = 2, **options: Any) -> FoldConfig:
    return config(batch, group_size=size, baseline=True, **options)


def test_a_rollout_and_its_baseline_are_a_group_whose_rewards_are_all_compared() -> None:
    s = Stream(remax())
    s.rollouts(0, view(0, reward=1.0), greedy(1, 0.0))
    assert s.state.reward_sum == 1.0 and s.state.reward_count == 1, "the mean reward is that of what is trained"
    assert s.state.stored_tokens == 3 and s.state.waiting_tokens == 3
    batch = s.train()
    assert used(batch) == (Used(0, (0, 1), (1, 1)),), "its message is needed again to train the same"
    assert list(batch.groups[0].compared) == [0]
    s = Stream(remax(size=3))
    s.rollouts(0, view(0, reward=1.0), view(1, reward=1.0), greedy(2, 1.0), group=3)
    assert s.dropped == [(1, 0, (0, 1, 2), "zero_variance", True)]
    s.rollouts(1, view(0, reward=1.0), view(1, reward=1.0), greedy(2, 0.0), group=3)
    assert tasks_of(s.close()) == (1,)
    assert sum(s.state.dropped["zero_variance"].lengths) == 2, "the greedy one is no answer among those dropped"


@pytest.mark.parametrize("first", ["tombstone", "samples"])
def test_without_its_greedy_answer_a_group_is_dropped_whole_whichever_came_first(first: str) -> None:
    s = Stream(remax(size=3))
    granted = s.state.granted
    if first == "tombstone":
        s.end(0, 2, group=3, reason="timeout")
        s.rollouts(0, view(0, reward=1.0), view(1, reward=0.0), group=3)
    else:
        s.rollouts(0, view(0, reward=1.0), view(1, reward=0.0), group=3)
        s.end(0, 2, group=3, reason="timeout")
    reasons = [(task, rollouts, reason) for _, task, rollouts, reason, _ in s.dropped]
    assert reasons == [(0, (2,), "timeout"), (0, (0, 1), "no_baseline")]
    assert s.state.is_retired(0) and s.state.granted == granted + 1, "its credit is given again"
    assert s.state.dropped["no_baseline"].tokens == 6


def test_a_baseline_is_needed_waited_for_and_corrected() -> None:
    s = Stream(remax())
    s.end(0, 1)
    s.rollouts(0, view(0))
    assert s.dropped[-1][3] == "no_baseline"
    s.end(1, 0)
    s.rollouts(1, greedy(1))
    assert s.dropped[-1][3] == "empty", "nothing is left that its reward could be compared with"
    s.end(2, 0)
    s.end(2, 1)
    assert s.state.retired == 3 and s.state.pending == {}
    s = Stream(remax(late_versions=1))
    s.rollouts(0, view(0, reward=1.0), greedy(1))
    assert s.close() is None
    s.reward(0, 1, 0.5)
    assert s.train().groups[0].rollouts[1].reward == 0.5
    s.rollouts(1, view(0, oldest=1, reward=1.0), greedy(1, highest=1))
    s.rollouts(2, view(0, oldest=1, reward=1.0), greedy(1, 0.0, highest=1))
    s.train()
    assert s.dropped == [(3, 1, (0, 1), "unrewarded", True)]
    s = Stream(remax())
    s.rollouts(0, view(0, reward=1.0), greedy(1, 0.0))
    s.reward(0, 1, 1.0)
    assert s.dropped == [(1, 0, (0, 1), "zero_variance", True)]


def test_the_versions_of_its_tokens_count_as_far_as_they_must_exist() -> None:
    s = Stream(remax(staleness=1), replace(initial_state(remax()), version=Version(0, 5)))
    s.rollouts(0, view(0, oldest=4, reward=1.0), greedy(1, 0.0, highest=1))
    assert tasks_of(s.close()) == (0,)
    s.rollouts(1, view(0, oldest=3, reward=1.0), greedy(1, 0.0, highest=5))
    assert s.dropped == [(2, 1, (0, 1), "stale", True)], "nor a fresh one fresh"
    s = Stream(remax())
    effects = s.rollouts(0, view(0, reward=1.0), greedy(1, 0.0, highest=1))
    assert [letter.task for letter in effects.dead] == [0] and s.state.is_retired(0)
    # As a producer that knows no greedy rollouts stores them.
    s = Stream(remax())
    effects = s.rollouts(0, view(0, reward=1.0), view(1, reward=0.0))
    assert "rollout 1 of task 0" in effects.dead[0].reason and s.state.is_retired(0)
    assert not s.rollouts(1, view(0, reward=1.0), greedy(1, 0.0)).dead


def test_filters_look_at_what_is_trained_and_a_lost_blob_takes_the_group() -> None:
    filters = FiltersConfig(min_tokens=2, max_tokens=9, mean_reward=(0.0, 0.5), min_reward_std=0.0)
    s = Stream(remax(filters=filters, overlong="drop"))
    s.rollouts(0, view(0, reward=0.5), greedy(1, 1.0))
    assert tasks_of(s.close()) == (0,), "its mean is not theirs, and no filter measures it"
    s.rollouts(1, view(0, reward=0.75), greedy(1, 0.0))
    s.rollouts(2, view(0, reward=0.5, tokens=1), greedy(1, 0.0))
    assert [(task, reason) for _, task, _, reason, _ in s.dropped] == [(1, "too_easy"), (2, "too_short"), (2, "empty")]
    s = Stream(remax(filters=FiltersConfig(min_tokens=5, refused="mask", min_reward_std=0.0)))
    s.rollouts(0, view(0, reward=0.5), greedy(1, 0.0))
    assert s.dropped == [(1, 0, (0, 1), "empty", True)]
    s = Stream(remax())
    s.rollouts(0, view(0, reward=1.0), greedy(1, 0.0))
    assert s.state.ready == 1
    s.end(0, 1, reason="blob_missing")
    assert [drop[3] for drop in s.dropped] == ["blob_missing", "no_baseline"] and s.state.ready == 0


def test_agents_of_a_role_need_one_of_it_in_the_greedy_rollout() -> None:
    s = Stream(remax())
    of_greedy = replace(with_agents(1, 0.0, **{"solver/0": 0.0}), num_tokens=0, oldest=-1, newest=-1)
    s.rollouts(0, with_agents(0, 1.0, **{"solver/1": 0.5, "solver/2": 1.0}), of_greedy)
    assert tasks_of(s.train()) == (0,)
    s.rollouts(1, with_agents(0, 1.0, judge=0.5), of_greedy)
    assert s.dropped == [(2, 1, (0, 1), "no_baseline", True)]
    s.rollouts(2, view(0, reward=1.0), replace(only_agents(1, solver=0.0), num_tokens=0, oldest=-1, newest=-1))
    assert s.dropped[-1][3] == "no_baseline", "the rollout's own reward has no counterpart"


def test_the_warm_up_has_none() -> None:
    s = Stream(remax(warmup_steps=1))
    s.demonstration(0)
    batch = s.train(warm=True)
    assert batch.groups[0].baseline == -1 and s.state.warmup_end is not None
    task = s.state.warmup_end
    for one in range(1, task):
        s.demonstration(one)
        assert s.train().groups[0].baseline == -1
    s.rollouts(task, view(0, oldest=1, reward=1.0), greedy(1, 0.0, highest=1))
    assert s.train().groups[0].baseline == 1


def test_a_checkpoint_of_an_earlier_build_has_no_baselines() -> None:
    s = Stream(config(1))
    s.rollouts(0, view(0, reward=1.0), group=2)
    old = s.state.encode().replace(b"\xa8baseline\xff", b"").replace(b"\x86\xa4task", b"\x85\xa4task")
    assert len(old) < len(s.state.encode())
    assert FoldState.decode(old) == s.state


def test_expiry_and_waiting_see_tasks_as_ever() -> None:
    s = Stream(remax(batch=1, expire_versions=2))
    s.rollouts(0, view(0, reward=1.0))  # its greedy rollout hangs
    for number, task in enumerate((1, 2)):
        s.rollouts(task, view(0, oldest=number, reward=1.0), greedy(1, 0.0, highest=number))
        s.train()
    assert [(task, reason) for _, task, _, reason, _ in s.dropped] == [(0, "expired"), (0, "expired")]
    assert s.state.granted - s.state.retired == 2
