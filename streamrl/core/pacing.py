"""How many tasks may be issued: credits, and holding them back so that groups are ready just in time. Pure; part of the fold.

A task is outstanding from its grant to its end; outstanding tasks are in flight or ready. All credits together are one window:

```text
window = (S - k + 1) * B        S: max_staleness, k: debug.delay_versions, B: batch_tasks
```

k versions of the bound are used up by engines that lag on purpose, so that a task granted at version v is trained at v + S - k at the
latest while engines serve v - k.

With `hold_ahead` the window is not filled at any price: what is ready beyond the batch just trained only ages. A step then releases

```text
release = max(0, B + ceil((B - ready) / 2))        ready: groups that are complete after the step
```

so the controller steers towards one whole batch ready: at `ready = B` it replaces what was trained, above it holds, below it adds. The half
damps it, because an answer comes an episode later. It never starves the trainer: since outstanding >= ready + release >= B after every
step (the sum is lowest, 3B / 2, with nothing ready), and a task that ends untrained is replaced at once, B groups always become ready.
"""

from __future__ import annotations

from streamrl.core.state import FoldConfig, window


def refilled(granted: int, retired: int, ended: int, config: FoldConfig) -> int:
    """Tasks granted after `ended` tasks have ended without being trained, which makes `retired` that have ended in all."""
    full = retired + window(config)
    return max(granted, min(full, granted + ended) if config.hold_ahead else full)


def released(granted: int, retired: int, ready: int, dropped: int, config: FoldConfig) -> int:
    """Tasks granted after a step.

    Args:
        granted: before the step.
        retired: tasks that have ended, the batch and what was dropped behind it included.
        ready: groups that are still ready.
        dropped: tasks that ended with the step without being trained; they are replaced in any case.
        config: B, S, k and whether to hold.
    """
    full = retired + window(config)
    if not config.hold_ahead:
        return max(granted, full)
    batch = config.batch_tasks
    release = max(0, batch + (batch - ready + 1) // 2)
    return max(granted, min(full, granted + dropped + release))
