"""What is stored under keys beside a task while it is open, and removed once it has ended: checkpoints of its rollouts, its attempts.

The keys share one stream with the grants and the presence of workers, so what is left behind takes the room of those.
"""

from __future__ import annotations

from streamrl.bus.protocol import KeyValue
from streamrl.schemas.subjects import PREFIX_ATTEMPTS, PREFIX_CHECKPOINTS


def checkpoint_key(task: int, rollout: int) -> str:
    """Of a rollout's checkpoint."""
    return f"{PREFIX_CHECKPOINTS}{task}/{rollout}"


def attempts_key(task: int) -> str:
    """Of how often a process has died that ran the task alone."""
    return f"{PREFIX_ATTEMPTS}{task}"


async def checkpoint_keys(keys: KeyValue, task: int) -> list[str]:
    """Those that there are of a task, whoever stored them."""
    return list(await keys.keys(f"{PREFIX_CHECKPOINTS}{task}/"))


async def vanish(keys: KeyValue, key: str) -> None:
    """Remove a key so that nothing of it stays: a deleted one would leave its marker for ever, an empty value that expires does not."""
    await keys.put(key, b"", ttl_s=1.0)


async def remove_task_keys(keys: KeyValue, task: int) -> None:
    """Remove whatever is there of a task that has ended; for who has not worked on it. Raises BusError."""
    found = await checkpoint_keys(keys, task)
    if await keys.get(attempts_key(task)) is not None:
        found.append(attempts_key(task))
    for key in found:
        await vanish(keys, key)
