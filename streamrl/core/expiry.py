"""How long something may take, in versions: tasks that were issued too long ago, rewards that do not come. No clock has a part in it."""

from __future__ import annotations

from streamrl.core.state import FoldConfig, FoldState, PendingTask


def expired(state: FoldState, config: FoldConfig) -> tuple[int, ...]:
    """Tasks granted `expire_versions` versions ago or earlier that still have rollouts to end, rising.

    Tasks of the warm-up never expire: demonstrations have no age. Nor do those whose rollouts have all ended: they wait for their rewards
    or their batch, and `stale` and `late_versions` decide on them. Under `wait` none does, nor while its rollouts may be in time
    (`streamrl.config.check` refuses such settings; a back-test may try other bounds beside them).
    """
    if config.stale == "wait" or config.expire_versions <= config.max_staleness - config.delay_versions:
        return ()
    due = min(state.granted_by(state.version.number - config.expire_versions), state.granted)
    return tuple(task for task in range(state.watermark, due) if state.is_open(task) and not state.in_warmup(task))


def unrewarded(state: FoldState, task: PendingTask, config: FoldConfig) -> bool:
    """Whether a complete group has waited for its rewards as long as it may."""
    waits = config.late_versions > 0 and task.complete and not task.ready
    return waits and state.version.number - task.arrived >= config.late_versions


def must_wait(state: FoldState, config: FoldConfig) -> bool:
    """Whether a task granted at version <= v - S is still unfinished."""
    due = state.granted_by(state.version.number - config.max_staleness)
    for task in range(state.watermark, min(due, state.granted)):
        pending = state.pending.get(task)
        if task not in state.retired_above and not (pending is not None and pending.ready):
            return True
    return False
