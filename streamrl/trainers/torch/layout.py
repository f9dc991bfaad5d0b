"""How a rank lays out its share of a batch's samples for a model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.core.balance import split_ranks
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import Indices, MicroBatch, empty_micro_batch, plan_micro_batches
from streamrl.trainers.torch.parallel import Parallel


class Layout(NamedTuple):
    """How samples are laid out for some models: see `plan_micro_batches`."""

    free_masks: bool
    """Several samples a row, their prompts shared; else one sample a row."""
    row_length: int
    """Of packed rows; 0: rows are not packed."""


def micro_batches(
    batch: TrainBatch, wanted: npt.NDArray[np.bool_], samples: Indices, layout: Layout, width: int, budget: int, parallel: Parallel
) -> list[MicroBatch]:
    """This rank's share of `samples`, the same for all that share its rows; empty ones at the end where others have more and wait."""
    rank, ranks = parallel.row_share
    own = plan_micro_batches(
        batch,
        wanted,
        samples if layout.row_length else split_ranks(batch, samples, ranks, width=width)[rank],
        budget=budget,
        share_prefixes=layout.free_masks,
        several_per_row=layout.free_masks,
        row_length=layout.row_length,
        width=width,
        rank=rank,
        ranks=ranks,
    )
    return own + [empty_micro_batch(batch, layout.row_length)] * (parallel.most(len(own)) - len(own))
