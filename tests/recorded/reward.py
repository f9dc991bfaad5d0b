"""The reward of the recorded runs, named in their configuration as `tests.recorded.reward:score`: it stays what and where it is."""

import asyncio
from typing import Any


async def score(task: Any, episode: Any, *, failing: bool = False, seconds: float = 0.0) -> float:
    """The sum of the completion's letters, by threes, after some time; with `failing`, one task in nine ends as a tombstone."""
    await asyncio.sleep(seconds)
    if failing and task.index % 9 == 4:
        raise ValueError("no reward for this one")
    return float(sum(map(ord, episode.completion)) % 3)
