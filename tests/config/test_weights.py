"""How many copies of the parameters a trainer has on a GPU."""

from __future__ import annotations

from streamrl.config.weights import WeightsConfig


def test_changes_take_one_more_than_the_ring() -> None:
    assert WeightsConfig().buffers == 1
    assert WeightsConfig(transport="ipc").buffers == 2
    assert WeightsConfig(transport="ipc", ring=3).buffers == 3
    assert WeightsConfig(transport="ipc", ring=3, also_on_bus=True).buffers == 4
    assert WeightsConfig(transport="bus", ring=1).buffers == 2
    assert WeightsConfig(transport="bus", ring=1, anchor_every=1).buffers == 1
