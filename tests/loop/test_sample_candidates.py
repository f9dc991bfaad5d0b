"""Candidates that samples keep beside them: stored first, put to their tokens, and where they are not what they say the stream is told."""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.config.recording import Recording
from streamrl.consumers.training.reader import open_message
from streamrl.consumers.training.sample_blobs import Replayed, blobs_named
from streamrl.consumers.training.stream_fold import StreamFold
from streamrl.core.batches import TrainBatch
from streamrl.producers.candidates import store_candidates
from streamrl.producers.episode import Branch, Episode, Segment
from streamrl.schemas.candidates import Candidates, CandidateSets, bounds_of
from streamrl.schemas.codec import encode
from streamrl.schemas.samples import BlobRef, LogprobMode, Sample, VersionSpan
from streamrl.schemas.subjects import SAMPLES
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.loop.test_sample_blobs import World as Stream

CUT = Sampling(top_p=0.9)
LOGPROB = float(np.log(np.float32(0.5)))
Said = list[list[int]]
ALL = Recording(support=True, top=4)


def candidates(said: Said, *, logprobs: bool = True) -> Candidates:
    """Each of its tokens is as likely as the others."""
    values = np.array([-np.log(len(row)) for row in said for _ in row], np.float32) if logprobs else None
    ids = np.array([token for row in said for token in row], np.int32)
    return Candidates.of(CandidateSets(bounds_of(np.array([len(row) for row in said])), ids, values))


def turn(ids: list[int], said: Said | None, **more: object) -> Segment:
    spans = (VersionSpan(len(ids), Version()),)
    return Segment(tuple(ids), (LOGPROB,) * len(ids), spans, candidates=None if said is None else candidates(said), **more)  # type: ignore[arg-type]


def episode(rollout: int, *segments: Segment, sampling: Sampling = CUT, **more: object) -> Episode:
    texts = tuple("x" for segment in segments if segment.is_model)
    given: Any = {"segments": (Segment((5, 6, 7)), *segments), "finish_reason": "stop", "turns": texts, "sampling": sampling, **more}
    return Episode(rollout=rollout, reward=float(rollout), **given)


class World(Stream):
    """A producer's side and a trainer's side of one stream."""

    sampling = CUT
    store = staticmethod(store_candidates)

    async def batch(self, recording: Recording = ALL) -> tuple[TrainBatch, StreamFold]:
        self.replayed = Replayed(recording=recording, vocab_size=10)
        return await super().batch()


@pytest.fixture
def world() -> World:
    return World(MemoryBus("r"), "r")


def said_in(batch: TrainBatch) -> Said:
    sets = batch.candidates
    assert sets is not None
    return [sets.ids[a:b].tolist() for a, b in zip(sets.bounds, sets.bounds[1:], strict=False)]


async def test_they_reach_their_tokens_over_turns_tools_and_unrecorded_turns(world: World) -> None:
    chat = episode(0, turn([1, 2], [[1, 3], [2, 8]]), Segment((9, 9)), turn([3], None), Segment((9,)), turn([4], [[0, 4]]))
    await world.publish([chat, episode(1, turn([4], [[4, 5]]))])
    assert len(await world.bus.sample_blobs.names()) == 2
    batch, _ = await world.batch()
    assert said_in(batch) == [[], [], [], [1, 3], [2, 8], [], [], [], [], [0, 4], [], [], [], [4, 5]]
    assert batch.candidates is not None and batch.candidates.logprobs == pytest.approx([LOGPROB] * 8)


async def test_what_a_branch_shares_is_said_once(world: World) -> None:
    first, second = turn([1, 2], [[1, 3], [2, 8]]), turn([3], [[3, 4]])
    other = episode(0, first, turn([4], [[4, 7]]), branch=Branch(0, 5))
    await world.publish([episode(0, first, second), other, episode(1, turn([4], [[4, 5]]))])
    assert len(await world.bus.sample_blobs.names()) == 2, "samples of a rollout share a blob"
    batch, _ = await world.batch()
    assert said_in(batch) == [[], [], [], [1, 3], [2, 8], [3, 4], *[[]] * 5, [4, 7], [], [], [], [4, 5]]


async def test_only_what_is_asked_for_is_taken(world: World) -> None:
    """A turn drawn from the whole vocabulary says its likeliest, one drawn from a part of it that part."""
    whole = turn([2], [[2, 3]], sampling=Sampling())
    chat = episode(0, turn([1], [[1, 3]]), whole)
    await world.publish([chat, episode(1, turn([4], [[4, 5]]))])
    support, _ = await world.batch(Recording(support=True))
    assert said_in(support) == [[], [], [], [1, 3], [], [], [], [], [4, 5]]
    top, _ = await world.batch(Recording(top=4))
    assert said_in(top) == [[], [], [], [], [2, 3], [], [], [], []]
    nothing, _ = await world.batch(Recording())
    assert nothing.candidates is None


async def test_log_probs_from_before_the_cut_have_no_support(world: World) -> None:
    before = [episode(k, turn([1], [[1, 3]]), logprob_mode=LogprobMode.TEMPERATURE) for k in range(2)]
    await world.publish(before)
    batch, _ = await world.batch(Recording(support=True))
    assert said_in(batch) == [[]] * 8 and (batch.top_p == 1).all()


def changed(**values: object) -> Callable[[Sample], Sample]:
    """Another reference of rollout 0's sample."""

    def change(sample: Sample) -> Sample:
        assert sample.candidates is not None
        return replace(sample, candidates=replace(sample.candidates, **values)) if sample.rollout == 0 else sample  # type: ignore[arg-type]

    return change


REFS: list[dict[str, object]] = [{"name": "0/0.ffffffff"}, {"sha256": "ab" * 32}, {"start_row": 1 << 40, "num_rows": 1}, {"num_rows": 2}]


@pytest.mark.parametrize("wrong", REFS, ids=str)
async def test_a_sample_that_names_what_is_not_there_ends_its_rollout(world: World, wrong: dict[str, object]) -> None:
    await world.publish([episode(0, turn([1, 2], [[1, 3], [2, 8]])), episode(1, turn([4], [[4, 5]]))], changed(**wrong))
    batch, drop = await world.dropped()
    assert said_in(batch) == [[], [], [], [4, 5]] and drop.detail.startswith("candidates of sample 0: expected ")


GOOD: Said = [[], [], [], [1, 3], [2, 8]]
BODIES: dict[str, tuple[str, bytes]] = {
    "nothing": ("", b""),
    "noise": ("", bytes(range(256))),
    "a thousand million rows of nothing": ("1000000000 candidates", encode(Candidates(np.array([10**9], "<u4").tobytes(), b""))),
    "bytes that are no ids": ("4 bytes a count", encode(Candidates(b"", b"\0"))),
    "beyond the vocabulary": ("ids in 0 .. 9", encode(candidates([*GOOD[:4], [2, 10]]))),
    "not in order": ("rising order", encode(candidates([*GOOD[:4], [8, 2]]))),
    "one twice": ("each once", encode(candidates([*GOOD[:4], [2, 2]]))),
    "without the token": ("among its own candidates", encode(candidates([*GOOD[:4], [3, 8]]))),
    "no log-probs": ("log-probs of the candidates", encode(candidates(GOOD, logprobs=False))),
    "no numbers": ("finite log-probs", encode(msgspec.structs.replace(candidates(GOOD), logprobs=np.full(4, np.nan, "<f4").tobytes()))),
    "likelier than sure": ("finite log-probs of at most 0", encode(replace(candidates(GOOD), logprobs=np.full(4, 0.5, "<f4").tobytes()))),
    "more than can be": ("add up", encode(replace(candidates(GOOD), logprobs=np.full(4, -0.1, "<f4").tobytes()))),
    "less than all": ("add up", encode(replace(candidates(GOOD), logprobs=np.full(4, -3.0, "<f4").tobytes()))),
}


@pytest.mark.parametrize("case", ["", *BODIES])
async def test_a_blob_that_holds_something_else_ends_its_rollout(world: World, case: str) -> None:
    said, body = BODIES[case] if case else ("", encode(candidates(GOOD)))
    await world.bus.sample_blobs.put("0/0.00000000", body)
    ref = BlobRef("0/0.00000000", hashlib.sha256(body).hexdigest(), 0, 5)
    episodes = [episode(0, turn([1, 2], None)), episode(1, turn([4], [[4, 5]]))]
    await world.publish(episodes, lambda sample: replace(sample, candidates=ref) if sample.rollout == 0 else sample)
    if case:
        assert said in (await world.dropped())[1].detail
    else:
        batch, fold = await world.batch()
        assert said_in(batch)[:5] == GOOD and not fold.own.drops, "what the others are measured by"


async def test_an_engine_that_says_too_few_ends_its_rollout(world: World) -> None:
    await world.publish([episode(0, turn([1, 2], [[1, 3]])), episode(1, turn([4], [[4, 5]]))])
    await world.dropped()


async def test_who_does_not_look_at_them_fetches_nothing_and_retention_knows_their_names(world: World) -> None:
    await world.publish([episode(k, turn([1], [[1, 3]])) for k in range(2)])
    samples = open_message(await world.bus.fetch(SAMPLES, 1)).samples
    assert samples is not None and blobs_named(samples) == set(await world.bus.sample_blobs.names())
    await world.lose()
    batch, fold = await world.batch(Recording())
    assert batch.num_samples == 2 and not fold.own.drops
