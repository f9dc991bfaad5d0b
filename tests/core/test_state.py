"""The fold's state: its encoding, and drops without number."""

import msgspec
import pytest

from streamrl.config.filters import FiltersConfig
from streamrl.core.state import DROPS_CHUNK, Epoch, FoldConfig, FoldState, PendingAgent, PendingRollout, PendingTask, initial_state, window
from streamrl.errors import SchemaError
from streamrl.schemas.ledger import Drop
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.records import Stream, config, view


def test_state_survives_encoding() -> None:
    s = Stream(config(2, 2))
    s.group(4)
    s.group(1)
    s.train()
    s.rollouts(0, view(1, reward=None, oldest=1), group=3)
    s.end(0, 2, group=3)
    s.reward(2, 0, 0.5)
    s.group(3, oldest=1)
    s.end(5)
    state = FoldState.decode(s.state.encode())
    assert state == s.state and state.encode() == s.state.encode()
    assert state.pending[0].ended == (2,) and state.retired_above == frozenset({1, 4, 5})


def test_what_a_configuration_does_not_name_is_off() -> None:
    """A recorded configuration that lacks its key decided without it."""
    bare = FoldConfig(batch_tasks=1, max_staleness=0)
    assert (bare.max_len, bare.inexact, bare.overlong, bare.expire_versions, bare.late_versions) == (0, "allow", "train", 0, 0)
    assert FoldConfig(batch_tasks=2, max_staleness=1) == FoldConfig(
        batch_tasks=2,
        group_size=0,
        max_staleness=1,
        stale="drop",
        drop_zero_variance=True,
        late_versions=0,
        warmup_steps=0,
        warmup_until=1.0,
        hold_ahead=False,
        delay_versions=0,
        vocab_size=0,
        overlong_buffer=0,
        overlong_penalty=1.0,
        filters=FiltersConfig(min_reward_std=0.0),
    )


def test_the_first_open_task_is_the_next_one_when_all_have_ended() -> None:
    assert FoldState(granted=3, watermark=3).first_open == 3
    assert FoldState(granted=3, watermark=1).first_open == 1


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa7version\xa1x"])
def test_a_damaged_state_is_a_schema_error(data: bytes) -> None:
    with raises(SchemaError, size_bytes=len(data)):
        FoldState.decode(data)


@pytest.mark.parametrize("number", [0, 1, DROPS_CHUNK, DROPS_CHUNK + 1, 3 * DROPS_CHUNK, 5 * DROPS_CHUNK - 1])
def test_any_number_of_drops_is_kept_in_order(number: int) -> None:
    state = FoldState()
    for sequence in range(number):
        state = state.with_drop(Drop(sequence, 0, (), "late"))
    full = max(0, number - 1) // DROPS_CHUNK
    assert [len(chunk) for chunk in state.older_drops] == [DROPS_CHUNK] * full
    assert state.num_drops == number and len(state.newest_drops) == number - full * DROPS_CHUNK
    assert [drop.sequence for drop in state.drops] == list(range(number))
    for after in (0, 1, DROPS_CHUNK - 1, DROPS_CHUNK, DROPS_CHUNK + 1, number - 1, number):
        assert state.drops_after(max(0, after)) == state.drops[max(0, after) :]
    assert FoldState.decode(state.encode()) == state


def test_a_state_of_before_drops_were_cut_into_chunks_is_read() -> None:
    drops = tuple(Drop(sequence, 0, (), "late") for sequence in range(2 * DROPS_CHUNK))
    state = FoldState.decode(msgspec.msgpack.encode({"cursor": 9, "drops": drops}))
    assert state.drops == drops
    assert state.with_drop(Drop(10**6, 0, (), "late")).drops == (*drops, Drop(10**6, 0, (), "late"))


def rollout(*, tokens: int = 3, oldest: int = 0, reward: float | None = None, arrived: int = 0) -> PendingRollout:
    return PendingRollout(1, 1, tokens, oldest, oldest, reward, arrived=arrived)


def task_of(*rollouts: PendingRollout, size: int = 2, ended: tuple[int, ...] = ()) -> PendingTask:
    return PendingTask(0, "main", size, dict(enumerate(rollouts)), ended)


def test_a_state_that_says_nothing_is_the_one_before_any_record() -> None:
    assert FoldState.decode(msgspec.msgpack.encode({})) == FoldState(
        version=Version(0, 0),
        cursor=0,
        cursor_s=0.0,
        watermark=0,
        retired_above=frozenset(),
        pending={},
        ready=0,
        granted=0,
        grants=(),
        newest_drops=(),
        older_drops=(),
        epochs=(Epoch(0, 0, None),),
        early_rewards={},
        reward_sum=0.0,
        reward_count=0,
        warmup_end=0,
        warmup_steps=0,
        warmup_score=0.0,
    )
    old = PendingRollout(sequence=1, num_samples=1, num_tokens=3, oldest=0, newest=0, reward=None)
    assert (old.sampled, old.grading, PendingAgent("a", (0,), None).revision) == (-1, 0, 0)
    assert (old.revision, old.arrived, PendingTask(0, "main", 2, {}).ended, Epoch(1, 4).last) == (0, 0, (), None)


@pytest.mark.parametrize(("staleness", "delay", "batch", "tasks"), [(0, 0, 1, 1), (2, 0, 3, 9), (4, 3, 8, 16), (4, 4, 5, 5)])
def test_the_first_grant_is_the_window(staleness: int, delay: int, batch: int, tasks: int) -> None:
    c = config(batch, staleness, delay_versions=delay)
    assert window(c) == tasks
    assert initial_state(c) == FoldState(granted=tasks, grants=((tasks, 0),), warmup_end=0)
    assert initial_state(config(batch, staleness, delay_versions=delay, warmup_steps=1)).warmup_end is None


@pytest.mark.parametrize(
    ("tokens", "oldest", "is_one"), [(0, -1, False), (1, -1, True), (3, -1, True), (1, 0, False), (3, 4, False), (0, 0, False)]
)
def test_a_demonstration_is_trained_on_and_sampled_by_no_model(tokens: int, oldest: int, is_one: bool) -> None:
    assert rollout(tokens=tokens, oldest=oldest).demonstration == is_one


@pytest.mark.parametrize(("sampled", "oldest", "length"), [(-1, 0, 3), (-1, -1, 0), (0, 0, 0), (1, 0, 1), (5, -1, 5)])
def test_what_was_sampled_counts_and_where_that_is_not_known_what_is_trained(sampled: int, oldest: int, length: int) -> None:
    assert msgspec.structs.replace(rollout(oldest=oldest), sampled=sampled).length == length


def owned(*agents: PendingAgent, samples: int, reward: float | None = None) -> PendingRollout:
    return PendingRollout(1, samples, 3, 0, 0, reward, revision=7, agents=agents)


def test_rewards_of_agents_are_of_their_own_samples() -> None:
    a, b = PendingAgent("a/1", (0, 3), 0.5, 2), PendingAgent("b", (1, 2), 0.25, 3)
    alone, beside = owned(a, b, samples=4), owned(a, b, samples=5)
    assert (alone.rewarded, beside.rewarded, owned(a, b, samples=5, reward=1.0).rewarded) == (True, False, True)
    assert list(beside.votes) == list(owned(a, b, samples=4, reward=1.0).votes) == [("a", 0.5), ("b", 0.25)]
    assert list(owned(a, samples=3, reward=1.0).votes) == [("", 1.0), ("a", 0.5)]
    assert [beside.revision_of(name) for name in ("a/1", "b", "", "c")] == [2, 3, 7, 7]
    assert msgspec.structs.replace(beside, reward=4.0, revision=8) == beside.with_reward(4.0, 8)
    # a/1 made the last sample, though b comes behind it by name.
    first = msgspec.structs.replace(alone, revision=0)
    assert [first.with_reward(4.0, 4, name).reward for name in ("a/1", "b")] == [4.0, None]
    assert [one.with_reward(4.0, 4, "a/1").reward for one in (alone, msgspec.structs.replace(beside, revision=0))] == [None, None]
    assert [(one.reward, one.revision) for one in first.with_reward(4.0, 4, "b").agents] == [(0.5, 2), (4.0, 4)]


@pytest.mark.parametrize(("baseline", "compared", "reward"), [(-1, [0, 1], None), (0, [1], 0.5), (1, [0], 0.25), (2, [0, 1], None)])
def test_a_greedy_rollout_is_compared_with_the_others(baseline: int, compared: list[int], reward: float | None) -> None:
    task = msgspec.structs.replace(task_of(rollout(reward=0.5), rollout(reward=0.25)), baseline=baseline)
    assert (list(task.compared), task.baseline_reward) == (compared, reward)


def test_a_task_is_complete_ready_and_arrived_with_its_rollouts() -> None:
    one = rollout(reward=1.0)
    assert [task_of(one).complete, task_of(one, one).complete, task_of(one, ended=(1,)).complete] == [False, True, True]
    assert not task_of(one, ended=(1,), size=3).complete
    known, unknown, demonstration = rollout(reward=0.0), rollout(), rollout(oldest=-1)
    assert task_of(known, known).ready and task_of(known, demonstration).ready and task_of(demonstration, demonstration).ready
    assert not task_of(known, unknown).ready and not task_of(unknown, unknown).ready and not task_of(unknown, demonstration).ready
    assert not task_of(known).ready, "it lacks a rollout"
    assert task_of(rollout(arrived=3), rollout(arrived=5)).arrived == 5
    assert task_of(ended=(0, 1)).arrived == 0


@pytest.mark.parametrize(
    ("of_rollouts", "oldest"), [((5, 2), 2), ((2, 5), 2), ((0, 3), 0), ((-1, 3), 3), ((-1, 0), 0), ((-1, -1), -1), ((), -1)]
)
def test_the_oldest_token_is_one_that_a_model_sampled(of_rollouts: tuple[int, ...], oldest: int) -> None:
    assert task_of(*(rollout(oldest=number) for number in of_rollouts)).oldest == oldest


@pytest.mark.parametrize(
    ("epoch", "lowest", "highest", "exists"),
    [
        (0, 0, 0, True),
        (0, 0, 5, True),
        (0, 5, 6, False),
        (1, 3, 4, False),
        (1, 4, 4, True),
        (1, 4, 7, True),
        (1, 5, 8, False),
        (2, 5, 6, False),
        (2, 6, 6, True),
        (2, 6, 10**9, True),  # not trained yet, which the fold checks apart from this
        (3, 6, 6, False),
    ],
)
def test_versions_exist_within_their_epoch(epoch: int, lowest: int, highest: int, exists: bool) -> None:
    state = FoldState(epochs=(Epoch(0, 0, 5), Epoch(1, 4, 7), Epoch(2, 6)))
    assert state.exists(epoch, lowest, highest) == exists
