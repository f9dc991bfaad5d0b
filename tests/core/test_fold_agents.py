"""Agents with rewards of their own in the fold, and the greedy rollout of a task, which is compared with and never trained."""

from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.config.filters import FiltersConfig
from streamrl.core.assembly import assemble, used
from streamrl.core.records import AgentView, Poison, Rewarded, Rollouts, RolloutView, judge
from streamrl.core.state import FoldConfig, FoldState, PendingRollout, initial_state
from streamrl.schemas.codec import encode
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.ledger import Used
from streamrl.schemas.samples import RewardUpdate
from streamrl.schemas.versions import Version
from tests.core.test_assembly import CONFIG, closed, row
from tests.support.records import Stream, config, tasks_of, view


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


def test_a_message_says_who_has_which_reward_and_a_batch_has_what_each_sample_is_trained_on() -> None:
    record, _ = judge("run.samples.main", 1, encode_samples(rows(0)), None)
    assert isinstance(record, Rollouts)
    assert [one.agents for one in record.rollouts] == [(AgentView("solver/0", (1, 2), 0.25),), (AgentView("solver/1", (0,), 0.5),)]
    assert [one.reward for one in record.rollouts] == [1.0, 0.5]
    batch, messages, state = closed([rows(0), rows(1)])
    found = assemble(batch, messages, state, CONFIG)
    assert found.agents == ("", "solver/0", "solver/0", "solver/1") * 2
    assert found.rewards.tolist() == [1.0, 0.25, 0.25, 0.5] * 2
    plain, messages, state = closed([[row(0, 0), row(0, 1)], [row(1, 0), row(1, 1)]])
    assert assemble(plain, messages, state, CONFIG).agents == ()


def test_an_agents_late_reward_is_read_and_a_wrong_name_or_two_of_one_are_not() -> None:
    update = RewardUpdate(task=3, rollout=1, reward=0.5, agent="solver/0")
    assert judge("run.rewards", 7, encode(update), None)[0] == Rewarded(7, 3, 1, 0.5, 1, None, "solver/0")
    assert isinstance(judge("run.rewards", 7, encode(replace(update, agent="a/b/c")), None)[0], Poison)
    assert isinstance(judge("run.rewards", 7, encode(replace(update, reward=np.inf)), None)[0], Poison)
    first, second, third, other = rows(0)
    record, _ = judge("run.samples.main", 1, encode_samples([first, second, replace(third, agent_reward=0.5), other]), "0")
    assert isinstance(record, Poison) and "agent solver/0" in record.reason


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
