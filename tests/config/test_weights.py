"""How many copies of the parameters a trainer has on a GPU."""

from __future__ import annotations

import pytest

from streamrl.config.weights import WeightsConfig


def test_changes_take_one_more_than_the_ring() -> None:
    assert WeightsConfig().buffers == 1
    assert WeightsConfig(transport="ipc").buffers == 2
    assert WeightsConfig(transport="ipc", ring=3).buffers == 3
    assert WeightsConfig(transport="ipc", ring=3, also_on_bus=True).buffers == 4
    assert WeightsConfig(transport="bus", ring=1).buffers == 2
    assert WeightsConfig(transport="bus", ring=1, anchor_every=1).buffers == 1


@pytest.mark.parametrize(
    ("weights", "snapshots"),
    [
        (WeightsConfig(), 1),
        (WeightsConfig(transport="ipc"), 2),
        (WeightsConfig(transport="bus"), 2),
        (WeightsConfig(also_on_bus=True), 2),
        (WeightsConfig(ring=3), 3),
        (WeightsConfig(transport="ipc", ring=1), 1),
    ],
)
def test_a_trainer_keeps_one_snapshot_where_it_is_copied_at_once(weights: WeightsConfig, snapshots: int) -> None:
    assert weights.snapshots == snapshots
