"""Reinforcement-learning post-training of LLMs as a stream over NATS JetStream.

The names below are what custom producers, rewards and scripts need; everything else is reached by its module. They are imported when
they are first asked for, so that `import streamrl` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.config.load import load as load_config
    from streamrl.config.tree import Config
    from streamrl.errors import StreamRLError
    from streamrl.producers.chat import Chat
    from streamrl.producers.episode import Episode
    from streamrl.producers.protocol import Context, Failure, Producer
    from streamrl.producers.rollout_engine import RolloutEngine
    from streamrl.rewards.protocol import Reward, RewardValue
    from streamrl.schemas.tasks import RolloutTask, Sampling
    from streamrl.schemas.versions import Version

__version__ = "0.1.0"

__all__ = [
    "Chat",
    "Config",
    "Context",
    "Episode",
    "Failure",
    "Producer",
    "Reward",
    "RewardValue",
    "RolloutEngine",
    "RolloutTask",
    "Sampling",
    "StreamRLError",
    "Version",
    "__version__",
    "load_config",
]

_HOMES = {
    "Chat": "producers.chat",
    "Config": "config.tree",
    "Context": "producers.protocol",
    "Episode": "producers.episode",
    "Failure": "producers.protocol",
    "Producer": "producers.protocol",
    "Reward": "rewards.protocol",
    "RewardValue": "rewards.protocol",
    "RolloutEngine": "producers.rollout_engine",
    "RolloutTask": "schemas.tasks",
    "Sampling": "schemas.tasks",
    "StreamRLError": "errors",
    "Version": "schemas.versions",
    "load_config": "config.load",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'streamrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"streamrl.{home}"), "load" if name == "load_config" else name)


def __dir__() -> list[str]:
    return __all__
