"""The bridge's rollouts with a model that writes given texts."""

from collections.abc import Sequence
from typing import Any

from streamrl.bridges.retrain import RetrainBridge
from streamrl.producers.episode import Episode
from streamrl.producers.rollout_engine import RolloutEngine
from tests.support.chat_templates import family
from tests.support.scripted import rollout_engine

QWEN = family("qwen3")
LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TEXTS = {"at once": ["7"], "wrong, look, right": ["3", LOOK, "7"], "never": ["1", "2", "3", "4", "5"]}


async def played(bridge: RetrainBridge, texts: Sequence[str], **context: Any) -> tuple[list[Episode], RolloutEngine]:
    engine = rollout_engine(QWEN, texts, **context)
    return await bridge(engine.context.task, engine), engine
