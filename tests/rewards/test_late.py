"""The reward service's side: what waits is read, what is published is stored once, what is out of range is refused."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.check import check
from streamrl.config.load import convert
from streamrl.config.tree import Config, DataConfig, RewardConfig
from streamrl.consumers.training.reader import open_message
from streamrl.core.records import Rewarded
from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.late import LateRewards
from streamrl.rewards.factory import is_user_code, make_reward
from streamrl.schemas.codec import decode
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import RewardUpdate
from streamrl.schemas.subjects import SAMPLES, Subjects
from tests.support.bad_messages import patched, template
from tests.support.errors import raises

WAITING = template((0, 1), reward=None)


async def test_a_reward_is_stored_once_by_task_rollout_and_revision(bus: Bus, run_id: str) -> None:
    rewards = LateRewards(bus, Subjects(run_id))
    first = await rewards.publish(4, 1, 0.5, parts={"format": 0.25}, sample=2)
    again = await rewards.publish(4, 1, 0.75)
    newer = await rewards.publish(4, 1, 0.75, revision=2)
    assert (first.sequence, again.sequence, again.duplicate, newer.sequence) == (1, 1, True, 2)
    message = await bus.fetch(SAMPLES, 1)
    expected = RewardUpdate(task=4, rollout=1, reward=0.5, revision=1, reward_parts={"format": 0.25}, sample=2)
    assert decode(message.body, RewardUpdate) == expected
    assert open_message(message).record == Rewarded(1, 4, 1, 0.5, 1, 2)
    given = [await rewards.publish(4, 1, 0.5, agent=agent) for agent in ("solver/0", "solver/1", "solver/0")]
    assert [(one.sequence, one.duplicate) for one in given] == [(3, False), (4, False), (3, True)], "an agent's stands beside it"
    assert open_message(await bus.fetch(SAMPLES, 3)).record == Rewarded(3, 4, 1, 0.5, 1, None, "solver/0")


async def test_samples_wait_for_the_reward_that_they_are_trained_on(bus: Bus, run_id: str) -> None:
    subjects = Subjects(run_id)
    row = replace(decode_samples(WAITING).rows()[0], group_size=3)
    rows = [
        replace(row, task=0, rollout=0, num_samples=3, sample=0, reward=1.0),
        replace(row, task=0, rollout=0, num_samples=3, sample=1, reward=1.0, agent="a"),
        replace(row, task=0, rollout=0, num_samples=3, sample=2, reward=1.0, agent="b", agent_reward=0.0),
        replace(row, task=0, rollout=1, sample=0, agent="b", agent_reward=0.0),
        replace(row, task=0, rollout=2, sample=0),
    ]
    await bus.publish(subjects.samples("main"), encode_samples(rows))
    async with aclosing(LateRewards(bus, subjects).unrewarded()) as waiting:
        found = [await anext(waiting) for _ in range(2)]
    assert [(sample.rollout, sample.sample, sample.agent) for _, sample in found] == [(0, 1, "a"), (2, 0, "")]


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": -1},
        {"rollout": -1},
        {"revision": 0},
        {"sample": -1},
        {"reward": float("nan")},
        {"parts": {"a": float("inf")}},
        {"agent": "a 0"},
    ],
)
async def test_what_is_out_of_range_is_refused(bus: Bus, run_id: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        await LateRewards(bus, Subjects(run_id)).publish(**{"task": 0, "rollout": 0, "reward": 1.0} | wrong)  # type: ignore[arg-type]
    assert (await bus.state(SAMPLES)).last == 0


async def test_what_waits_is_read_in_stream_order(bus: Bus, run_id: str) -> None:
    subjects = Subjects(run_id)
    rewards = LateRewards(bus, subjects)
    for task in range(3):
        await bus.publish(subjects.samples("main"), patched(template((0, 1)) if task == 1 else WAITING, task, 0))
        await bus.publish(subjects.samples("main"), b"junk")
        await rewards.publish(task, 0, 1.0)
    async with aclosing(rewards.unrewarded()) as waiting:
        found = [await anext(waiting) for _ in range(4)]
    assert [(sequence, sample.task, sample.rollout) for sequence, sample in found] == [(1, 0, 0), (1, 0, 1), (7, 2, 0), (7, 2, 1)]
    async with aclosing(rewards.unrewarded(after=1)) as waiting:
        assert (await anext(waiting))[0] == 7


async def test_a_service_that_fell_behind_a_trim_goes_on(bus: Bus, run_id: str) -> None:
    subjects = Subjects(run_id)
    for task in range(4):
        await bus.publish(subjects.samples("main"), patched(WAITING, task, 0))
    await bus.trim(SAMPLES, through=2)
    async with aclosing(LateRewards(bus, subjects).unrewarded()) as waiting:
        assert [(await anext(waiting))[1].task for _ in range(4)] == [2, 2, 3, 3]


def test_the_kind_late_is_no_reward_and_leaves_nothing_to_evaluate_by() -> None:
    assert make_reward(RewardConfig(kind="late")) is None and not is_user_code(RewardConfig(kind="late"))
    with raises(ConfigError, key="reward.options", got=["x"]):
        make_reward(RewardConfig(kind="late", options={"x": 1}))

    config = Config(data=DataConfig(train="a.jsonl"), reward=RewardConfig(kind="late"))
    check(config)
    with raises(ConfigError, key="data.heldout"):
        check(replace(config, data=DataConfig(train="a.jsonl", heldout="b.jsonl")))
    with raises(ConfigError, key="reward.workers"):
        check(replace(config, reward=RewardConfig(kind="late", workers=1)))
    with raises(ConfigError, key="reward.workers"):
        convert({"reward": {"workers": -1}}, where="test")
    with raises(ConfigError, key="reward.late_versions"):
        convert({"reward": {"kind": "late", "late_versions": -1}}, where="test")
