"""From the configuration to what the fold decides by."""

from __future__ import annotations

import math

from streamrl.config.loss import estimator_of
from streamrl.config.tree import Config
from streamrl.core.state import FoldConfig

NEVER = 1 << 62
"""Length of a warm-up that does not end."""


def fold_config(config: Config, vocab_size: int = 0) -> FoldConfig:
    """The part of the configuration that the fold depends on; `vocab_size` is the model's, 0 if it is not known."""
    supervised = config.run.kind == "sft"
    return FoldConfig(
        batch_tasks=config.tasks.batch_tasks,
        group_size=config.group_size,
        baseline=estimator_of(config.loss).greedy,
        max_staleness=config.tasks.max_staleness,
        stale=config.tasks.stale,
        drop_zero_variance=config.tasks.drop_zero_variance,
        late_versions=config.reward.late_versions,
        # Supervised fine-tuning is a warm-up to the fold: one demonstration a task, whose age does not matter.
        warmup_steps=NEVER if supervised else config.warmup.max_steps,
        warmup_until=math.inf if supervised else config.warmup.until,
        hold_ahead=config.tasks.hold_ahead,
        delay_versions=config.debug.delay_versions,
        vocab_size=vocab_size,
        max_len=config.model.max_len if config.tasks.check_max_len else 0,
        inexact=config.tasks.inexact,
        overlong=config.tasks.overlong,
        expire_versions=config.tasks.expire_versions,
        overlong_buffer=config.reward.overlong_buffer,
        overlong_penalty=config.reward.overlong_penalty,
        overlong_length=config.reward.overlong_length,
        length=config.reward.length,
        objectives=tuple(config.loss.objectives),
        filters=config.filters,
    )
