"""What of a message may be trained, before its groups are looked at: limits of the model, guessed versions, truncated samples, filters."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from streamrl.core.filters import masked, refusals
from streamrl.core.records import Rollouts, RolloutView
from streamrl.core.state import FoldConfig, PendingTask
from streamrl.schemas.ledger import Drop


def beyond_limits(record: Rollouts, config: FoldConfig) -> str:
    """What the model could not be trained on; empty if there is nothing."""
    if config.vocab_size and record.top_token >= config.vocab_size:
        return f"expected token ids below the model's {config.vocab_size}, got {record.top_token}"
    if config.max_len and record.longest > config.max_len:
        return f"expected samples of up to {config.max_len} tokens, which is model.max_len, got one of {record.longest}"
    return ""


def admit(
    task: PendingTask, record: Rollouts, views: Sequence[RolloutView], config: FoldConfig
) -> tuple[PendingTask, list[Drop], list[RolloutView]]:
    """Leave out the rollouts that `inexact`, `overlong` and the filters refuse, and of the others the tokens that they mask.

    They judge what is trained, so a greedy rollout, of which nothing is, passes.

    Args:
        task: what is known of their task.
        record: their message.
        views: rollouts that have not been seen before.
        config: the decisions.

    Returns:
        The task with the refused rollouts among its ended ones, a drop for each reason (the last retires a task all of whose rollouts have
        ended), and the others.
    """
    filtered = {rollout: reason for rollout, reason in refusals(record, config).items() if rollout != task.baseline}
    if not filtered and not any(view.shares for view in views):  # nearly always
        return task, [], list(views)
    kept: list[RolloutView] = []
    refused: dict[str, list[int]] = {}
    for view in views:
        if reason := _refused(view, config):
            refused.setdefault(reason, []).append(view.rollout)
        elif (reason := filtered.get(view.rollout)) is None:
            kept.append(view.without(inexact=config.inexact == "mask", truncated=config.overlong == "mask"))
        elif config.filters.refused == "mask":
            kept.append(masked(view))
        else:
            refused.setdefault(reason, []).append(view.rollout)
    if not refused:
        return task, [], kept
    task = replace(task, ended=(*task.ended, *sorted(rollout for rollouts in refused.values() for rollout in rollouts)))
    drops = [Drop(record.sequence, task.task, tuple(rollouts), reason) for reason, rollouts in sorted(refused.items())]
    if len(task.ended) == task.group_size:
        drops[-1] = replace(drops[-1], retires=True)
    return task, drops, kept


def _refused(view: RolloutView, config: FoldConfig) -> str:
    if config.inexact == "refuse" and view.inexact:
        return "inexact"
    return "truncated" if config.overlong == "drop" and view.truncated else ""
