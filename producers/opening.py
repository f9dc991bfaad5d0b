"""What an environment shows, as text, and a chat's beginning where it has something to say first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.schemas.tasks import RolloutTask


def opened(task: RolloutTask, shown: str, *, chat_template: bool) -> RolloutTask | str | Sequence[Mapping[str, Any]]:
    """For `engine.chat`: the task's prompt, with what the environment shows as the end of its last user message."""
    if not shown:
        return task
    if not chat_template:
        return f"{task.prompt}{shown}"
    messages = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else [*task.prompt]
    if messages[-1].get("role") != "user":
        return [*messages, {"role": "user", "content": shown}]
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{shown}"}]


def shown(seen: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """An observation of OpenEnv's as text: the field that is chosen, its one text, or all of it as JSON; or why an action was refused."""
    observation = seen.get("observation") or {}
    if "refused" in seen:
        return f"error: {seen['refused']}"
    if name := options.get("observation"):
        if name not in observation:
            raise ValueError(f"expected a field {name!r} in the observation (producer.options.observation), got {', '.join(observation)}")
        return str(observation[name])
    only = next(iter(observation.values())) if len(observation) == 1 else None
    return only if isinstance(only, str) else json.dumps(observation, ensure_ascii=False)
