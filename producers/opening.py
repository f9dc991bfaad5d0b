"""A chat's beginning where an environment has something to say first: the row's prompt, and what it shows."""

from __future__ import annotations

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
