"""Cut samples with one token more: the packing feeds their last own token, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.core.batches import TrainBatch
from streamrl.core.cuts import cut_samples, with_ends
from streamrl.core.packing import plan_micro_batches
from streamrl.schemas.samples import Status


def batch() -> TrainBatch:
    """Three samples of one task, of which the first and the last were cut, and one of another, cut and not trained."""
    return TrainBatch.from_lists(
        [[5, 6], [5, 6], [5, 6], [9]],
        [[7], [8, 8, 8], [7, 9], [4, 4]],
        loss_mask=[[True], [True] * 3, [True, False], [False, False]],
        tasks=[0, 0, 0, 1],
        status=[Status.TRUNCATED, Status.COMPLETED, Status.TRUNCATED, Status.TRUNCATED],
        rewards=[0.0] * 4,
    )


def test_only_trained_ones_are_cut() -> None:
    assert cut_samples(batch()).tolist() == [True, False, True, False]


@pytest.mark.parametrize("layout", [{}, {"share_prefixes": False}, {"share_prefixes": False, "several_per_row": False}, {"row_length": 16}])
def test_the_state_behind_the_last_token_is_there_and_of_that_token(layout: dict[str, Any]) -> None:
    own = batch()
    longer, ends = with_ends(own, cut_samples(own))
    assert np.array_equal(np.delete(longer.tokens, ends), own.tokens) and np.array_equal(np.delete(longer.loss_mask, ends), own.loss_mask)
    wanted = longer.loss_mask.copy()
    wanted[ends] = True
    micros = plan_micro_batches(longer, wanted, np.arange(4), budget=64, **layout)
    read: dict[int, tuple[int, int]] = {}
    for micro in micros:
        inputs, positions = micro.inputs.reshape(-1), micro.positions.reshape(-1)
        for source, target in zip(micro.source.tolist(), micro.target.tolist(), strict=True):
            assert target not in read
            read[target] = (int(inputs[source]), int(positions[source]))
        assert not set(ends.tolist()) & set(micro.fed.reshape(-1).tolist()), "what was added is never fed"
    assert set(read) == set(np.flatnonzero(wanted).tolist())
    for sample, end in zip((0, 2), ends.tolist(), strict=True):
        last = int(own.offsets[sample + 1]) - 1
        assert read[end] == (int(own.tokens[last]), int(own.lengths[sample]) - 1)


def test_nothing_cut_is_the_same_batch() -> None:
    own = replace(batch(), status=np.zeros(4, np.int8))
    longer, ends = with_ends(own, cut_samples(own))
    assert not len(ends) and np.array_equal(longer.tokens, own.tokens) and np.array_equal(longer.offsets, own.offsets)
