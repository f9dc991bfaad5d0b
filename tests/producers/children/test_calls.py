"""What the parent records of a completion, chunk by chunk, for a sample of user code."""

from __future__ import annotations

from streamrl.engines.protocol import Chunk
from streamrl.producers.children.calls import Recorded
from streamrl.producers.episode import Episode, Segment, samples_of
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version


def chunk(ids: tuple[int, ...], reason: str | None = None, **extras: float) -> Chunk:
    spans = (VersionSpan(len(ids), Version(0, 1)),)
    return Chunk(completion=0, token_ids=ids, logprobs=(-0.5,) * len(ids), spans=spans, finish_reason=reason, engine="e", extras=extras)


def test_the_engines_counters_come_with_the_last_chunk_and_count_once_in_a_turn_of_several_pieces() -> None:
    first, second = Recorded(), Recorded()
    first.add(chunk((1, 2)))
    first.add(chunk((3,), "stop", cached_tokens=4, spec_num_proposed_drafts=6, began_s=5.0))
    second.add(chunk((4, 5), "stop", cached_tokens=7, spec_num_correct_drafts=2))
    segments = (Segment((9, 9)), first.part(0, 2), first.part(2, 3), Segment((8,)), second.part(0, 2))
    task = RolloutTask(run="r", index=0, source="main", prompt_ids=(9, 9))
    [sample] = samples_of(task, [Episode(segments=segments, finish_reason="stop", turns=("a", "b"))], producer="p")
    assert sample.counters == {"cached_tokens": 11.0, "spec_num_proposed_drafts": 6.0, "spec_num_correct_drafts": 2.0}
