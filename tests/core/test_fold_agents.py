"""Agents with rewards of their own in the fold: what a group waits for, when it is flat, whose late reward one is."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.core.assembly import assemble
from streamrl.core.records import AgentView, Poison, Rewarded, Rollouts, RolloutView, judge
from streamrl.core.state import FoldState, PendingRollout
from streamrl.schemas.codec import encode
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import RewardUpdate
from tests.core.test_assembly import CONFIG, closed, row
from tests.support.records import Stream, config, view


def with_agents(rollout: int, reward: float | None, **agents: float | None) -> RolloutView:
    """A rollout with one sample of its own, and then one of each agent."""
    views = tuple(AgentView(name, (index,), own) for index, (name, own) in enumerate(sorted(agents.items()), 1))
    return replace(view(rollout, reward=reward, samples=1 + len(agents)), agents=views)


def only_agents(rollout: int, **agents: float | None) -> RolloutView:
    """A rollout all of whose samples are of agents; the last one's reward is the rollout's."""
    views = tuple(AgentView(name, (index,), own) for index, (name, own) in enumerate(sorted(agents.items())))
    return replace(view(rollout, reward=views[-1].reward, samples=len(agents)), agents=views)


def reward(s: Stream, task: int, rollout: int, value: float, revision: int = 1, *, agent: str = "", sample: int | None = None) -> None:
    s.put(Rewarded(s.next(), task, rollout, value, revision, sample, agent))


def test_a_group_is_flat_where_nothing_of_one_role_differs() -> None:
    s = Stream(config(1))
    s.rollouts(0, with_agents(0, 1.0, a=0.5), with_agents(1, 1.0, a=0.5))
    assert s.dropped == [(1, 0, (0, 1), "zero_variance", True)]
    s.rollouts(1, with_agents(0, 1.0, a=0.5), with_agents(1, 1.0, a=0.0))
    s.rollouts(2, with_agents(0, 1.0, a=0.5), with_agents(1, 0.0, a=0.5))
    assert [s.train().groups[0].task for _ in range(2)] == [1, 2], "one role that differs is enough"
    s = Stream(config(1))
    s.rollouts(0, with_agents(0, 1.0, **{"solver/0": 0.0, "solver/1": 1.0}), with_agents(1, 1.0), group=2)
    assert s.train().groups[0].task == 0
    s.rollouts(1, with_agents(0, 1.0, solver=0.0, selector=1.0), with_agents(1, 1.0), group=2)
    assert s.dropped[-1][3] == "zero_variance"
    s = Stream(config(1))
    s.rollouts(0, only_agents(0, a=1.0, b=0.5), only_agents(1, a=1.0, c=0.0))
    assert s.dropped == [(1, 0, (0, 1), "zero_variance", True)], "b and c are two roles, with one reward each"
    s = Stream(config(1))
    s.rollouts(0, with_agents(0, 1.0, a=50.0), with_agents(1, 0.0, a=-50.0))
    assert (s.state.reward_sum, s.state.reward_count) == (1.0, 2)


def test_late_and_early_rewards_of_agents_are_theirs() -> None:
    s = Stream(config(1))
    s.rollouts(0, with_agents(0, 1.0, a=None), with_agents(1, None, a=0.5))
    reward(s, 0, 0, 0.25, agent="a")
    assert s.close() is None
    reward(s, 0, 1, 0.0)
    rollouts = s.train().groups[0].rollouts
    assert [(one.reward, one.agents[0].reward) for one in rollouts.values()] == [(1.0, 0.25), (0.0, 0.5)]
    s = Stream(config(1))
    reward(s, 0, 0, 0.25, 2, agent="a/1")
    reward(s, 0, 0, 9.0, 1, agent="a/1")
    reward(s, 0, 0, 0.75, 1)
    assert s.dropped == [(2, 0, (0,), "superseded_reward", False)]
    s.rollouts(0, with_agents(0, None, **{"a/1": None}), with_agents(1, 1.0))
    assert s.state.early_rewards == {}
    reward(s, 0, 0, 0.5, 2, agent="a/1")
    assert s.dropped[-1] == (5, 0, (0,), "superseded_reward", False)
    first = s.train().groups[0].rollouts[0]
    assert (first.reward, first.agents[0].reward, first.agents[0].revision) == (0.75, 0.25, 2)
    s = Stream(config(1))
    reward(s, 1, 0, 9.0)
    reward(s, 0, 1, 3.0)
    s.rollouts(0, replace(only_agents(0, a=0.5), reward=2.0), only_agents(1, a=None))
    assert [(one.reward, one.agents[0].reward) for one in s.state.pending[0].rollouts.values()] == [(2.0, 0.5), (3.0, None)]
    assert s.state.early_rewards == {"1/0": (1, 9.0)}
    s.rollouts(1, only_agents(0, a=1.0))
    assert s.state.early_rewards == {}
    s = Stream(config(2))
    s.rollouts(0, with_agents(0, 1.0, a=0.5), with_agents(1, 1.0, a=0.0))
    reward(s, 0, 1, 0.5, agent="a")
    assert s.dropped == [(1, 0, (0, 1), "zero_variance", True)]
    s = Stream(config(1))
    s.rollouts(0, only_agents(0, a=0.0, z=None), only_agents(1, a=1.0, z=0.0))
    reward(s, 0, 0, 0.5, agent="z")
    assert s.state.pending[0].rollouts[0].reward == 0.5
    reward(s, 0, 0, 2.0)
    reward(s, 0, 0, 0.75, 2, agent="z")
    first = s.train().groups[0].rollouts[0]
    assert (first.reward, [one.reward for one in first.agents]) == (2.0, [0.0, 0.75])


@pytest.mark.parametrize(
    ("agent", "sample", "told"), [("b", None, "its agents are a"), ("", 1, "expected agent a in a reward for sample 1")]
)
def test_a_reward_for_nobody_is_quarantined(agent: str, sample: int | None, told: str) -> None:
    s = Stream(config(1))
    s.rollouts(0, with_agents(0, None, a=None), with_agents(1, 0.0))
    reward(s, 0, 0, 1.0, agent=agent, sample=sample)
    assert [(dead.sequence, told in dead.reason) for dead in s.effects.dead] == [(2, True)], s.effects
    assert s.state.is_open(0) is False and not s.state.is_retired(0), "its task goes on waiting"
    reward(s, 0, 1, 1.0, agent="a")
    assert ", which has none, " in s.effects.dead[0].reason
    reward(s, 0, 0, 1.0, agent="a", sample=1)
    assert not s.effects.dead, "it is that agent's sample"


def test_a_checkpoint_keeps_them_and_reads_those_of_earlier_builds() -> None:
    s = Stream(config(1))
    s.rollouts(0, with_agents(0, 1.0, a=None))
    reward(s, 0, 1, 0.5, agent="a")
    assert FoldState.decode(s.state.encode()) == s.state
    former = msgspec.to_builtins(s.state.pending[0].rollouts[0])
    del former["agents"]
    found = msgspec.convert(former, PendingRollout)
    assert found.agents == () and found.shares and found.rewarded


def rows(task: int) -> list[Any]:
    """Two rollouts: a chat of its own and a solver of two samples; a solver only."""
    own: dict[str, Any] = {"agent": "solver/0", "agent_reward": 0.25}
    return [
        row(task, 0, num_samples=3, reward=1.0),
        row(task, 0, index=1, num_samples=3, reward=1.0, **own),
        row(task, 0, index=2, num_samples=3, reward=1.0, **own),
        row(task, 1, reward=0.5, agent="solver/1", agent_reward=0.5),
    ]


def test_a_message_says_who_has_which_reward() -> None:
    record, _ = judge("run.samples.main", 1, encode_samples(rows(0)), None)
    assert isinstance(record, Rollouts)
    assert [one.agents for one in record.rollouts] == [(AgentView("solver/0", (1, 2), 0.25),), (AgentView("solver/1", (0,), 0.5),)]
    assert [one.reward for one in record.rollouts] == [1.0, 0.5]


def test_a_batch_has_the_reward_that_each_sample_is_trained_on() -> None:
    batch, messages, state = closed([rows(0), rows(1)])
    found = assemble(batch, messages, state, CONFIG)
    assert found.agents == ("", "solver/0", "solver/0", "solver/1") * 2
    assert found.rewards.tolist() == [1.0, 0.25, 0.25, 0.5] * 2
    plain, messages, state = closed([[row(0, 0), row(0, 1)], [row(1, 0), row(1, 1)]])
    assert assemble(plain, messages, state, CONFIG).agents == ()


def test_an_agents_late_reward_is_read_and_a_wrong_name_is_not() -> None:
    update = RewardUpdate(task=3, rollout=1, reward=0.5, agent="solver/0")
    assert judge("run.rewards", 7, encode(update), None)[0] == Rewarded(7, 3, 1, 0.5, 1, None, "solver/0")
    assert isinstance(judge("run.rewards", 7, encode(replace(update, agent="a/b/c")), None)[0], Poison)
    assert isinstance(judge("run.rewards", 7, encode(replace(update, reward=np.inf)), None)[0], Poison)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"agent": "a b"}, "agents of letters"),
        ({"agent": "a/b/c"}, "agents of letters"),
        ({"agent": "x" * 65}, "agents of letters"),
        ({"agent_reward": float("nan"), "agent": "a"}, "finite reward"),
    ],
)
def test_what_no_agent_is_becomes_a_dead_letter(values: dict[str, Any], told: str) -> None:
    record, _ = judge("run.samples.main", 1, encode_samples([row(0, 0, **values)]), "0")
    assert isinstance(record, Poison) and told in record.reason and record.task == 0


def test_two_rewards_of_one_agent_become_a_dead_letter() -> None:
    first, second, third, other = rows(0)
    record, _ = judge("run.samples.main", 1, encode_samples([first, second, replace(third, agent_reward=0.5), other]), "0")
    assert isinstance(record, Poison) and "agent solver/0" in record.reason


@pytest.mark.parametrize("rewarded", ["a", "b", "the rollout"])
def test_a_failed_grading_ends_a_rollout_of_which_only_some_agents_have_rewards(rewarded: str) -> None:
    """The producer has given one of two rewards, which may be what counts as the rollout's; without an end it would wait for ever."""
    of = {"a": only_agents(0, a=1.0, b=None), "b": only_agents(0, a=None, b=1.0), "the rollout": with_agents(0, 1.0, a=None)}[rewarded]
    s = Stream(config(1, drop_zero_variance=False))
    # A rollout all of whose samples are of agents has the reward of the last one that has some.
    s.rollouts(0, replace(of, reward=1.0, grading=7), with_agents(1, 0.5))
    s.end(0, 0, reason="timeout", grading=7)
    assert s.dropped == [(2, 0, (0,), "timeout", False)]
    assert sorted(s.state.pending[0].rollouts) == [1] and s.state.ready == 1


def test_a_failed_grading_behind_all_rewards_ends_nothing_however_many_agents_there_are() -> None:
    s = Stream(config(1, drop_zero_variance=False))
    s.rollouts(0, replace(only_agents(0, a=1.0, b=None), grading=7), with_agents(1, 0.5))
    s.put(Rewarded(s.next(), 0, 0, 0.0, 1, agent="b", grading=7))
    s.end(0, 0, grading=7)
    assert s.dropped == [(3, 0, (0,), "superseded_reward", False)] and s.state.ready == 1
    s = Stream(config(1, drop_zero_variance=False))
    names = [f"solver/{number}" for number in range(200)]
    for name in names:
        s.put(Rewarded(s.next(), 0, 0, 1.0, 1, agent=name, grading=7))
    s.rollouts(0, replace(only_agents(0, **dict.fromkeys(names)), grading=7), group=1)
    assert s.state.ready == 1 and s.dropped == [] and s.state.early_rewards == {}
