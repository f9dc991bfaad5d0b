"""Requests for rewards: what they hold, what cannot be asked for, what is no request, and answers that nobody may give."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import Config, DataConfig, RewardConfig
from streamrl.core.records import Ended, Poison, Rewarded, judge
from streamrl.errors import ConfigError, SchemaError
from streamrl.producers import grading
from streamrl.producers.claims import Claims
from streamrl.producers.episode import Episode, Segment, samples_of
from streamrl.producers.grading import GradingRequest, ask_for_rewards
from streamrl.producers.groups import Group
from streamrl.producers.protocol import Claim, Failure
from streamrl.producers.publishing import Publisher
from streamrl.producers.rewarder import MOST_DELIVERIES, Asked, Requests, Rewarder, check_wanted
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.samples import RewardUpdate, Tombstone, VersionSpan
from streamrl.schemas.subjects import GRADING, SAMPLES, Subjects, kind_of
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version
from tests.support.errors import raises

RUN = "run"
TASK = RolloutTask(run=RUN, index=4, source="main", prompt="1+2=", label="3", num_rollouts=3, metadata={"level": 2})


def episode(rollout: int, *, reward: float | None = None, metadata: dict[str, Any] | None = None) -> Episode:
    answer = Segment(token_ids=[5, 6], logprobs=[-0.5, -0.25], spans=(VersionSpan(2, Version(0, 3)),))
    return Episode(
        segments=(Segment(token_ids=[7]), answer),
        finish_reason="stop",
        turns=(f"answer {rollout}",),
        rollout=rollout,
        reward=reward,
        metadata=metadata or {},
    )


def publisher(bus: MemoryBus) -> Publisher:
    return Publisher(bus, Subjects(RUN), producer="rewarder-0")


async def stored(bus: MemoryBus) -> list[RewardUpdate | Tombstone]:
    """What is on the sample stream."""
    found: list[RewardUpdate | Tombstone] = []
    for sequence in range(1, (await bus.state(SAMPLES)).last + 1):
        message = await bus.fetch(SAMPLES, sequence)
        found.append(decode(message.body, RewardUpdate if kind_of(message.subject) == "rewards" else Tombstone))
    return found


def test_a_reward_sees_what_it_would_have_seen() -> None:
    request = GradingRequest(TASK, (episode(0, metadata={"tool": [1, None]}), episode(1, reward=0.5)))
    found = GradingRequest.decode(request.encode())
    assert found.encode() == request.encode() and found.task == TASK and found.rollouts == (0,)
    assert [(one.turns, one.metadata, one.reward) for one in found.episodes] == [
        (("answer 0",), {"tool": [1, None]}, None),
        (("answer 1",), {}, 0.5),
    ]


async def test_what_has_no_reward_is_asked_for_and_names_its_request() -> None:
    bus = MemoryBus(RUN)
    episodes = [episode(0), episode(1, reward=0.5), episode(2)]
    samples = samples_of(TASK, episodes, producer="producer-0")
    for number in (1, 2):  # another attempt asks anew
        named, failures = await ask_for_rewards(publisher(bus), TASK, episodes, samples)
        assert [sample.grading for sample in named] == [number, 0, number] and failures == []
    assert GradingRequest.decode((await bus.fetch(GRADING, 1)).body).task == TASK
    assert await ask_for_rewards(publisher(bus), TASK, [episode(1, reward=0.5)], samples[1:2]) == ([samples[1]], [])
    assert (await bus.state(GRADING)).last == 2


@pytest.mark.parametrize(("metadata", "most"), [({"n": 1 << 80}, 1 << 20), ({}, 10)])
async def test_what_cannot_be_asked_for_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch, metadata: dict[str, Any], most: int) -> None:
    monkeypatch.setattr(grading, "MAX_BYTES", most)
    bus = MemoryBus(RUN)
    episodes = [episode(0, metadata=metadata), episode(1, reward=0.5)]
    samples = samples_of(TASK, [episode(0), episode(1, reward=0.5)], producer="producer-0")
    kept, failures = await ask_for_rewards(publisher(bus), TASK, episodes, samples)
    assert [sample.rollout for sample in kept] == [1] and (await bus.state(GRADING)).last == 0
    assert [(one.rollout, one.reason) for one in failures] == [(0, "failed")] and failures[0].detail.startswith("reward: ")


def no_requests() -> dict[str, bytes]:
    whole = GradingRequest(TASK, (episode(0),)).encode()
    first = msgspec.msgpack.decode(zlib.decompress(whole))
    first["episodes"][0]["segments"] = []
    return {
        "junk": b"\x00junk",
        "nothing": b"",
        "cut off": whole[:-5],
        "another record": zlib.compress(encode(RewardUpdate(task=1, rollout=0, reward=1.0))),
        "an episode of nothing": zlib.compress(msgspec.msgpack.encode(first)),
        "a bomb": zlib.compress(bytes(1 << 16)),
    }


@pytest.mark.parametrize("name", no_requests())
def test_what_is_no_request_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(grading, "_UNPACKED_BYTES", 1 << 15)
    with pytest.raises(SchemaError):
        GradingRequest.decode(no_requests()[name])


class Runner:
    """Scores by a list; what is no number is a failure's detail."""

    def __init__(self, *given: float | str) -> None:
        self.given = given
        self.calls = 0

    async def score(self, task: RolloutTask, episodes: Sequence[Episode]) -> Group:
        self.calls += 1
        failures = []
        for one, value in zip(episodes, self.given, strict=True):
            if isinstance(value, str):
                failures.append(Failure(one.rollout, "timeout", value))
            elif one.reward is None:
                one.reward = value  # in place, as GroupRunner does
        failed = {failure.rollout for failure in failures}
        return Group(tuple(one for one in episodes if one.rollout not in failed), tuple(failures))


async def test_answers_name_their_request_and_a_repeat_changes_nothing() -> None:
    bus = MemoryBus(RUN)
    runner = Runner(0.25, 9.0, "it hung")
    rewarder = Rewarder(runner, publisher(bus))  # type: ignore[arg-type]
    for _ in range(2):
        request = GradingRequest(TASK, (episode(0), episode(1, reward=0.5), episode(2)))
        await rewarder.work(Asked(7, request), Claim())
    reward, stone = await stored(bus)
    assert reward == RewardUpdate(task=4, rollout=0, reward=0.25, grading=7)
    assert isinstance(stone, Tombstone)
    assert (stone.rollout, stone.reason, stone.detail, stone.grading, stone.group_size) == (2, "timeout", "it hung", 7, 3)
    await rewarder.work(Asked(8, GradingRequest(TASK, (episode(0), episode(1, reward=0.5), episode(2)))), Claim())
    assert len(await stored(bus)) == 4
    await rewarder.work(Asked(9, GradingRequest(TASK, (episode(0),))), Claim(MOST_DELIVERIES + 1))
    stone = (await stored(bus))[4]
    assert isinstance(stone, Tombstone) and (stone.reason, stone.rollout, runner.calls) == ("deliveries", 0, 3), "it was asked too often"


async def test_agents_of_a_rollout_have_answers_of_their_own() -> None:
    """Of rollout 0 the agent and the rollout wait, of 1 the rollout alone; a grader that fails for an agent ends its rollout."""
    bus = MemoryBus(RUN)

    def both(rollout: int, reward: float | None) -> tuple[Episode, Episode]:
        return msgspec.structs.replace(episode(rollout, reward=reward), agent="solver/0"), episode(rollout)

    request = GradingRequest(TASK, (*both(0, None), *both(1, 0.5), *both(2, None)))
    assert (request.rollouts, request.waiting[:2]) == ((0, 1, 2), ((0, ""), (0, "solver/0")))
    runner: Any = Runner(0.25, 1.0, 9.0, 0.75, "it hangs", 1.0)
    await Rewarder(runner, publisher(bus)).work(Asked(1, GradingRequest.decode(request.encode())), Claim())
    found = await stored(bus)
    rewards = {(one.rollout, one.agent or ""): one.reward for one in found if isinstance(one, RewardUpdate)}
    assert rewards == {(0, ""): 1.0, (0, "solver/0"): 0.25, (1, ""): 0.75}
    assert [(one.rollout, one.reason) for one in found if isinstance(one, Tombstone)] == [(2, "timeout")]


async def test_a_message_that_is_no_request_leaves_the_queue_and_is_said() -> None:
    bus = MemoryBus(RUN)
    events: list[tuple[str, dict[str, Any]]] = []

    class Worker:
        async def event(self, kind: str, detail: dict[str, Any]) -> None:
            events.append((kind, detail))

    rewarder = Rewarder(Runner(1.0), publisher(bus))  # type: ignore[arg-type]
    await bus.publish(Subjects(RUN).grading("main"), b"junk")
    await bus.publish(Subjects(RUN).grading("main"), GradingRequest(TASK, (episode(0),)).encode())
    queue = Requests(Worker())  # type: ignore[arg-type]
    claims = Claims(bus, publisher(bus), "main", rewarder.work, concurrency=4, ack_wait_s=30.0, queue=queue)
    draining = asyncio.Event()
    running = asyncio.create_task(claims.run(draining))
    async with asyncio.timeout(60):
        while (await bus.state(GRADING)).messages:
            await asyncio.sleep(0.01)
    draining.set()
    await running
    assert events == [("grading_unreadable", {"sequence": 1, "bytes": 4})]
    assert [(one.task, one.grading) for one in await stored(bus)] == [(4, 2)]


def test_a_failed_grading_is_of_a_rollout() -> None:
    stone = Tombstone(task=1, reason="failed", group_size=2, grading=3)
    assert isinstance(judge("run.tombstones.main", 1, encode(stone), "1")[0], Poison)
    stone = msgspec.structs.replace(stone, rollout=1)
    assert judge("run.tombstones.main", 1, encode(stone), "1")[0] == Ended(1, "", 1, 1, 2, "failed", "", 3)
    update = RewardUpdate(task=1, rollout=0, reward=1.0, grading=3)
    assert judge("run.rewards", 1, encode(update), "1")[0] == Rewarded(1, 1, 0, 1.0, 1, None, grading=3)
    for number in (0, -1, 1 << 63):  # no request has such a number
        for subject, record in (("rewards", update), ("tombstones.main", stone)):
            wrong = encode(msgspec.structs.replace(record, grading=number))
            assert isinstance(judge(f"run.{subject}", 1, wrong, "1")[0], Poison), number


def test_a_run_whose_producers_score_has_nothing_for_a_rewarder() -> None:
    config = Config(data=DataConfig(train="a.jsonl"))
    with raises(ConfigError, key="reward.workers"):
        check_wanted(config)
    check_wanted(msgspec.structs.replace(config, reward=RewardConfig(workers=1)))
