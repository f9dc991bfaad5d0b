"""retrain (github.com/teilomillet/retrain) on streamrl: its environments and rewards as a run's producer, its trainer as a run.

retrain itself is not needed: what it hands over is checked by its keys (docs/retrain.md).
"""

from __future__ import annotations

from streamrl.bridges.retrain.adapter import StreamrlTrainerAdapter
from streamrl.bridges.retrain.rollouts import RetrainBridge, create_retrain_bridge
from streamrl.bridges.retrain.trajectories import processed_trajectory

__all__ = ["RetrainBridge", "StreamrlTrainerAdapter", "create_retrain_bridge", "processed_trajectory"]
