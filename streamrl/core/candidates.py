"""Which tokens of a batch were drawn from a part of the vocabulary, so that their candidates are all of it. Pure; `T` tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.core.batches import TrainBatch


def restricted_tokens(batch: TrainBatch) -> npt.NDArray[np.bool_]:
    """[T] those that top-p, top-k or min-p cut something off for."""
    cut = (batch.top_p < 1) | (batch.top_k > 0)
    return cut if batch.min_p is None else cut | (batch.min_p > 0)


def candidate_metrics(batch: TrainBatch, *, support: bool, likeliest: bool) -> dict[str, float]:
    """Of how many trained tokens what is asked for is known; nothing where there are no tokens of which it could be.

    Args:
        batch: the whole batch.
        support: of those that were drawn from a part of the vocabulary.
        likeliest: of those that were drawn from all of it.
    """
    cut = restricted_tokens(batch)
    asked = {"train/support_replayed": cut & support, "train/likeliest_known": ~cut & likeliest}
    found = {name: those & batch.loss_mask for name, those in asked.items()}
    known = np.zeros(batch.num_tokens, np.bool_) if batch.candidates is None else batch.candidates.counts > 0
    return {name: float(known[those].mean()) for name, those in found.items() if those.any()}
