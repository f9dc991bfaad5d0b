"""Episodes: what they hold, what they share, and the candidates beside their tokens."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.errors import SchemaError
from streamrl.producers.candidates import candidates_of
from streamrl.producers.children.calls import Recorded, bare_chunk
from streamrl.producers.children.saved import pack, unpack
from streamrl.producers.completions import complete
from streamrl.producers.episode import Episode, Segment, bare, samples_of
from streamrl.producers.gateway.entries import Tokens
from streamrl.schemas.candidates import Candidates, CandidateSets, bounds_of
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
        ((PROMPT, Segment((3,), (math.nan,), LAST.spans)), "log-probs must be"),
        ((PROMPT, Segment((3,), (0.5,), LAST.spans)), "log-probs must be"),
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


def said(*rows: list[int]) -> Candidates:
    ids = np.array([token for row in rows for token in row], np.int32)
    return Candidates.of(CandidateSets(bounds_of(np.array([len(row) for row in rows])), ids))


def chunk(ids: tuple[int, ...], reason: str | None = None, **extras: Any) -> Chunk:
    spans = (VersionSpan(len(ids), Version(0, 1)),)
    return Chunk(completion=0, token_ids=ids, logprobs=(-0.5,) * len(ids), spans=spans, finish_reason=reason, engine="e", extras=extras)


CHUNKS = (chunk((1, 2)), chunk((3,), "stop", candidates=said([1, 4], [2], [3, 5]), began_s=1.0))


def rows(segments: tuple[Segment, ...]) -> list[list[int]]:
    sets = candidates_of(Episode(segments=(Segment((9,)), *segments), finish_reason="stop"))
    assert sets is not None
    return [sets.ids[a:b].tolist() for a, b in zip(sets.bounds, sets.bounds[1:], strict=False)]


class Said:
    """An engine that says these chunks."""

    def __init__(self, chunks: tuple[Chunk, ...]) -> None:
        self._chunks = chunks

    async def generate(self, request: GenerateRequest):
        for one in self._chunks:
            yield one


@pytest.mark.parametrize("chunks", [CHUNKS, (chunk((1, 2, 3), "stop", **CHUNKS[1].extras),)], ids=["several", "one"])
async def test_a_completion_has_those_of_its_last_chunk(chunks: tuple[Chunk, ...]) -> None:
    [made] = await complete(Said(chunks), GenerateRequest(request_id="r", prompt_ids=(9,)))  # type: ignore[arg-type]
    assert rows((made.segment,)) == [[], [1, 4], [2], [3, 5]]
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(Tokens.of(made)), type=Tokens)
    assert again.segment(made.segment.sampling) == msgspec.structs.replace(made.segment, token_ids=(1, 2, 3), logprobs=(-0.5,) * 3)  # type: ignore[arg-type]
    [stripped] = bare((made.segment,))
    assert stripped.candidates is None and stripped.token_ids == made.segment.token_ids


def test_user_code_never_sees_them_and_its_parts_of_turns_have_their_own() -> None:
    turn = Recorded()
    for one in CHUNKS:
        turn.add(one)
    assert bare_chunk(CHUNKS[1]).extras == {"began_s": 1.0} and bare_chunk(CHUNKS[0]) is CHUNKS[0]
    assert turn.part(0, 3).candidates is None, "what a child is given"
    segments = turn.part(0, 1, beside=True), Segment((8, 8)), turn.part(1, 3, beside=True)
    assert rows(segments) == [[], [1, 4], [], [], [2], [3, 5]]


def test_a_turn_that_came_with_a_checkpoint_says_nothing() -> None:
    turn = Recorded()
    for one in CHUNKS:
        turn.add(one)
    _, [again] = unpack(pack(b"mine", [turn]))
    episode = Episode(segments=(Segment((9,)), again.part(0, 3, beside=True)), finish_reason="stop")
    assert candidates_of(episode) is None


def test_the_engines_counters_come_with_the_last_chunk_and_count_once_in_a_turn_of_several_pieces() -> None:
    first, second = Recorded(), Recorded()
    first.add(chunk((1, 2)))
    first.add(chunk((3,), "stop", cached_tokens=4, spec_num_proposed_drafts=6, began_s=5.0))
    second.add(chunk((4, 5), "stop", cached_tokens=7, spec_num_correct_drafts=2))
    segments = (Segment((9, 9)), first.part(0, 2), first.part(2, 3), Segment((8,)), second.part(0, 2))
    task = RolloutTask(run="r", index=0, source="main", prompt_ids=(9, 9))
    [sample] = samples_of(task, [Episode(segments=segments, finish_reason="stop", turns=("a", "b"))], producer="p")
    assert sample.counters == {"cached_tokens": 11.0, "spec_num_proposed_drafts": 6.0, "spec_num_correct_drafts": 2.0}
