"""Candidates on their way from an engine's chunks to a sample's blob: by a completion, by user code's turns, by a gateway's journal."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.producers.candidates import candidates_of
from streamrl.producers.children.calls import Recorded, bare_chunk
from streamrl.producers.children.saved import pack, unpack
from streamrl.producers.completions import complete
from streamrl.producers.episode import Episode, Segment, bare, samples_of
from streamrl.producers.gateway.entries import Tokens
from streamrl.schemas.candidates import Candidates, CandidateSets, bounds_of
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version


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
