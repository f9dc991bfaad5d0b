from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.errors import SchemaError
from streamrl.producers.episode import Episode, Segment, samples_of
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import Branch, VersionSpan
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version

PROMPT = Segment((1, 2))
TURN = Segment((3, 4, 5), (-0.1, -0.2, -0.3), (VersionSpan(1, Version(0, 6)), VersionSpan(2, Version(0, 7))))
TOOL = Segment((8, 9))
LAST = Segment((10,), (-0.5,), (VersionSpan(1, Version(1, 7)),))


def task(num_rollouts: int = 2) -> RolloutTask:
    return RolloutTask(run="run", index=5, source="main", num_rollouts=num_rollouts, label="45", metadata={"row": 1}, data_epoch=3)


def episode(*segments: Segment, rollout: int = 0, reward: float | None = None) -> Episode:
    return Episode(segments=segments or (PROMPT, TURN), finish_reason="stop", rollout=rollout, reward=reward, reward_parts={})


def test_columns_say_for_each_token_who_sampled_it() -> None:
    [sample] = samples_of(task(1), [episode(PROMPT, TURN, TOOL, LAST)], producer="producer-0")
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 8, 9, 10]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 1]
    assert sample.logprobs == pytest.approx(np.array([0, 0, -0.1, -0.2, -0.3, 0, 0, -0.5], np.float32))
    assert [(span.length, span.version) for span in sample.spans] == [
        (2, None),
        (1, Version(0, 6)),
        (2, Version(0, 7)),
        (2, None),
        (1, Version(1, 7)),
    ]
    assert (sample.task, sample.data_epoch, sample.label, sample.metadata) == (5, 3, "45", {"row": 1})


def test_samples_of_a_rollout_share_the_reward_of_its_last_episode() -> None:
    episodes = [episode(rollout=1, reward=0.25), episode(rollout=0, reward=1.0), episode(rollout=1, reward=0.75)]
    samples = samples_of(task(), episodes, producer="p")
    assert [(s.rollout, s.sample, s.num_samples, s.reward) for s in samples] == [(0, 0, 1, 1.0), (1, 0, 2, 0.75), (1, 1, 2, 0.75)]


@pytest.mark.parametrize(
    ("segments", "complaint"),
    [
        ((), "at least one prompt token"),
        ((TURN,), "at least one prompt token"),
        ((Segment(()), TURN), "at least one prompt token"),
        ((PROMPT, TOOL), "nothing to train on"),
        ((PROMPT, Segment((3, 4), (-0.1,), TURN.spans)), "one log-prob for each of 2"),
        ((PROMPT, Segment((3,), (-0.1,), TURN.spans)), "version spans over 1"),
        ((PROMPT, Segment((3,), (-0.1,), (VersionSpan(1, None),))), "needs a version"),
        ((PROMPT, Segment((3,), (math.nan,), LAST.spans)), "finite"),
        ((PROMPT, Segment((3,), (0.5,), LAST.spans)), "at most 0"),
        ((PROMPT, TURN, Segment((8,), (-0.1,))), "environment tokens have no log-probs"),
    ],
)
def test_what_is_no_episode_is_refused(segments: tuple[Segment, ...], complaint: str) -> None:
    with pytest.raises(SchemaError, match=complaint):
        Episode(segments=segments, finish_reason="stop", rollout=2)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-40, 1e300, math.nan, math.inf])
def test_a_turn_at_a_temperature_that_no_trainer_takes_is_refused(temperature: float) -> None:
    turns = (PROMPT, TURN, TOOL, replace(LAST, temperature=temperature))
    with pytest.raises(SchemaError, match="segment 3: a turn's temperature"):
        Episode(segments=turns, finish_reason="stop")
    if temperature == 0:
        Episode(segments=turns, finish_reason="stop", sampling=Sampling(temperature=0.0))  # says nothing of its own


def test_finish_reason_reward_and_rollout_are_checked() -> None:
    with pytest.raises(SchemaError, match="finish_reason"):
        Episode(segments=(PROMPT, TURN), finish_reason="eos")
    with pytest.raises(SchemaError, match="finite"):
        Episode(segments=(PROMPT, TURN), finish_reason="stop", reward=math.inf)
    with pytest.raises(SchemaError, match="rollouts 0 to 1"):
        samples_of(task(2), [episode(rollout=2)], producer="p")


OTHER = Segment((11, 12), (-0.4, -0.6), (VersionSpan(2, Version(1, 8)),))


def branched(segments: tuple[Segment, ...], parent: int, num_shared: int, *, rollout: int = 0) -> Episode:
    return replace(episode(*segments, rollout=rollout), branch=Branch(parent, num_shared))


def test_what_a_branch_shares_is_trained_in_its_parent_only() -> None:
    root = episode(PROMPT, TURN, TOOL, LAST)
    compacted = branched((PROMPT, Segment((20, 21)), OTHER), 0, 2)
    forked = branched((PROMPT, TURN, TOOL, OTHER), 0, 7)
    within = branched((PROMPT, Segment((3, 4), (-0.1, -0.2), (*TURN.spans[:1], VersionSpan(1, Version(0, 7)))), OTHER), 2, 4)
    made = samples_of(task(1), [root, compacted, forked, within], producer="p")
    rows = decode_samples(encode_samples(made)).rows()
    assert [row.branch for row in rows] == [None, Branch(0, 2), Branch(0, 7), Branch(2, 4)]
    assert [row.loss_mask.tolist() for row in rows] == [
        [0, 0, 1, 1, 1, 0, 0, 1],
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 1, 1],
    ]
    assert [each.num_sampled for each in (root, compacted, forked, within)] == [(3, 1), (2,), (2,), (2,)]


@pytest.mark.parametrize(
    ("segments", "parent", "num_shared", "complaint"),
    [
        ((PROMPT, OTHER), 1, 2, "among the 1 episodes"),
        ((PROMPT, OTHER), -1, 2, "among the 1 episodes"),
        ((PROMPT, OTHER), 0, 3, "begin with 3 tokens"),
        ((PROMPT, OTHER), 0, 0, "begin with 0 tokens"),
        ((PROMPT, TURN), 0, 5, "begin with 5 tokens"),
        ((PROMPT, TURN, TOOL), 0, 5, "nothing to train on"),
        ((PROMPT, TURN, OTHER), 0, 2**40, "begin with"),
    ],
)
def test_a_branch_of_nothing_is_refused(segments: tuple[Segment, ...], parent: int, num_shared: int, complaint: str) -> None:
    with pytest.raises(SchemaError, match=complaint):
        samples_of(task(1), [episode(), branched(segments, parent, num_shared)], producer="p")


def of(agent: str, reward: float | None, rollout: int = 0, **parts: float) -> Episode:
    return Episode(segments=(PROMPT, TURN), finish_reason="stop", rollout=rollout, reward=reward, agent=agent, reward_parts=parts)


def test_rewards_of_agents_stand_beside_their_rollouts_the_last_is_the_rollouts() -> None:
    episodes = [of("a/1", 0.25, first=1.0), of("", 1.0, main=1.0), of("a/1", 0.5, last=2.0), of("b", None), of("a/1", None, rollout=1)]
    samples = decode_samples(encode_samples(samples_of(task(), episodes, producer="p"))).rows()
    assert [(s.rollout, s.agent, s.reward, s.agent_reward, s.trained_reward, s.reward_parts) for s in samples] == [
        (0, "a/1", 1.0, 0.5, 0.5, {"last": 2.0}),
        (0, "", 1.0, None, 1.0, {"main": 1.0}),
        (0, "a/1", 1.0, 0.5, 0.5, {"last": 2.0}),
        (0, "b", 1.0, None, None, {}),
        (1, "a/1", None, None, None, {}),
    ]
    samples = samples_of(task(), [of("a", 0.25), of("b", 0.5)], producer="p")
    assert [(s.reward, s.agent_reward) for s in samples] == [(0.5, 0.25), (0.5, 0.5)]


@pytest.mark.parametrize("agent", ["a b", "a/", "/1", "a/b/c", "ä", "x" * 65, 7.5 + 1j])
def test_what_is_no_name_of_an_agent_is_refused(agent: Any) -> None:
    with pytest.raises(SchemaError, match="solver/2"):
        of(agent, 1.0)
