"""Where the tokens of samples went, stored beside them: a blob for each rollout, before its samples (R3, arXiv 2510.11370)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.producers.episode import Episode, routed_experts
from streamrl.producers.publishing import Publisher
from streamrl.schemas.codec import encode
from streamrl.schemas.experts import RoutedExperts
from streamrl.schemas.samples import Sample


async def store_experts(publisher: Publisher, samples: Sequence[Sample], episodes: Sequence[Episode]) -> list[Sample]:
    """The samples, each with the rows of its rollout's blob where all its turns say their experts and some of it is trained.

    Args:
        publisher: stores the blobs.
        samples: what `samples_of` made of the episodes.
        episodes: in any order.
    """
    made = sorted(episodes, key=lambda episode: episode.rollout)  # stable, as in `samples_of`
    trained = ((place, episode) for place, episode in enumerate(made) if samples[place].loss_mask.any())
    found = {place: experts for place, episode in trained if (experts := routed_experts(episode)) is not None}

    def body(places: Sequence[int]) -> bytes:
        rows = np.concatenate([found[place] for place in places])
        return encode(RoutedExperts(str(rows.dtype), (rows.shape[0], rows.shape[1], rows.shape[2]), rows.tobytes()))

    rows = {place: len(experts) for place, experts in found.items()}
    return await publisher.rows_beside(samples, rows, "routed_experts", body)
