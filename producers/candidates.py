"""What else could have been drawn at the tokens of samples, stored beside them: a blob for each rollout, before its samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.producers.episode import Episode
from streamrl.producers.publishing import Publisher
from streamrl.schemas.candidates import Candidates, CandidateSets, joined, no_candidates
from streamrl.schemas.codec import encode
from streamrl.schemas.samples import Sample


async def store_candidates(publisher: Publisher, samples: Sequence[Sample], episodes: Sequence[Episode]) -> list[Sample]:
    """The samples, each with the rows of its rollout's blob where one of its turns says candidates.

    Args:
        publisher: stores the blobs.
        samples: what `samples_of` made of the episodes.
        episodes: in any order.
    """
    made = sorted(episodes, key=lambda episode: episode.rollout)  # stable, as in `samples_of`
    found = {place: sets for place, episode in enumerate(made) if (sets := candidates_of(episode)) is not None}
    rows = {place: sets.num_tokens for place, sets in found.items()}
    return await publisher.rows_beside(
        samples, rows, "candidates", lambda places: encode(Candidates.of(joined([found[place] for place in places])))
    )


def candidates_of(episode: Episode) -> CandidateSets | None:
    """Of all tokens of an episode, none at those of prompt and environment and at what a branch shares; None where no turn says any."""
    parts = [None if one.candidates is None else one.candidates.sets() for one in episode.segments]
    if all(part is None or not len(part.ids) for part in parts):
        return None
    parts = [no_candidates(len(one.token_ids)) if part is None else part for one, part in zip(episode.segments, parts, strict=True)]
    sets = joined(parts)
    shared = 0 if episode.branch is None else episode.branch.num_shared
    return sets.without(np.arange(sets.num_tokens) < shared) if shared else sets
