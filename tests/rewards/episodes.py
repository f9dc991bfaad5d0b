"""Episodes as rewards see them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.rewards.factory import built_in
from streamrl.schemas.samples import Status
from streamrl.schemas.tasks import RolloutTask


class Episode(msgspec.Struct):
    completion: str
    rollout: int = 0
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] = {}
    agent: str = ""
    thinking: bool = False

    @property
    def turns(self) -> Sequence[str]:
        return (self.completion,)


def task(label: Any = None, **fields: Any) -> RolloutTask:
    return RolloutTask(run="run", index=3, source="main", row=7, label=label, **fields)


def only(kind: str, label: Any, completion: str, metadata: dict[str, Any] | None = None, **options: Any) -> Sequence[Any]:
    """What a built-in reward gives one completion."""
    return asyncio.run(built_in(kind, options).score(task(label, metadata=metadata or {}), [Episode(completion)]))
