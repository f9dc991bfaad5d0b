"""Which tokens of a batch were drawn from a part of the vocabulary, so that their candidates are all of it. Pure; `T` tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.core.batches import TrainBatch


def restricted_tokens(batch: TrainBatch) -> npt.NDArray[np.bool_]:
    """[T] those that top-p, top-k or min-p cut something off for."""
    cut = (batch.top_p < 1) | (batch.top_k > 0)
    return cut if batch.min_p is None else cut | (batch.min_p > 0)


def replay_metrics(batch: TrainBatch) -> dict[str, float]:
    """Of the trained tokens that were drawn from a part of the vocabulary, how many say what it was; nothing where there are none."""
    cut = restricted_tokens(batch) & batch.loss_mask
    if not cut.any():
        return {}
    return {"train/support_replayed": 0.0 if batch.candidates is None else float((batch.candidates.counts[cut] > 0).mean())}
