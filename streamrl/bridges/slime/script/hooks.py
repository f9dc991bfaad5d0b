"""Flags that name code. Each is the key of its name in the table `[slime]`, where this version of streamrl has that table.

`HOOKS` is the one place that says what becomes of them without it; a row's `instead` goes once the table has its key.
"""

from __future__ import annotations

import msgspec

from streamrl.bridges.slime.script.flag import Flag
from streamrl.config.tree import Config

NONZERO_STD = "check_reward_nonzero_std"
"""slime's own filter, also with `_with_fallback` behind it: it is tasks.drop_zero_variance."""


class Hook(msgspec.Struct, frozen=True):
    """A flag, and what serves in place of the key of its name."""

    flag: str
    does: str
    instead: str = ""
    """A key of ours that takes a function of another signature; empty: the flag is refused."""
    nearest: str = ""


HOOKS: tuple[Hook, ...] = (
    Hook("--custom-generate-function-path", "makes a rollout", "producer.function", "async def producer(task, engine)"),
    Hook("--custom-rm-path", "scores", "reward.kind", "def score(task, episode)"),
    Hook("--dynamic-sampling-filter-path", "keeps groups", "filters.function", "def keep(task, episodes)"),
    Hook("--custom-advantage-function-path", "computes advantages", "loss.advantage", "a function of docs/algorithms.md"),
    Hook("--custom-tis-function-path", "corrects", nearest="loss.correction: kind, level, reject and veto have what mis.py and IcePop do"),
    Hook("--custom-pg-loss-reducer-function-path", "reduces the loss", nearest="loss.reduction"),
    Hook("--custom-reward-post-process-path", "changes rewards", nearest="loss.normalize_rewards, loss.normalize_std, or loss.advantage"),
    Hook("--group-rm", "scores groups at once", nearest="a class with `score` in reward.kind gets a group"),
    Hook("--eval-function-path", "evaluates", nearest="[[evaluation.sets]] with a `function` each"),
    Hook("--buffer-filter-path", "chooses from a buffer", nearest="nothing is buffered: filters.function"),
    Hook("--rollout-sample-hook-path", "changes samples", nearest="producer.function"),
    Hook("--rollout-sample-filter-path", "masks samples", nearest="filters.refused = 'mask', or filters.function"),
    Hook("--rollout-all-samples-process-path", "sees all samples", nearest="`streamrl record` and `export`"),
    Hook("--rollout-data-postprocess-path", "changes batches", nearest="producer.function"),
    Hook("--custom-convert-samples-to-train-data-path", "makes batches", nearest="producer.function"),
    Hook("--custom-rollout-log-function-path", "logs", nearest="metrics.sinks"),
    Hook("--custom-eval-rollout-log-function-path", "logs", nearest="metrics.sinks"),
    Hook("--custom-megatron-init-path", "runs in Megatron's trainer", nearest="nothing of Megatron's own trainer runs here"),
    Hook("--custom-megatron-before-log-prob-hook-path", "runs in Megatron's trainer", nearest="loss.policy"),
    Hook("--custom-megatron-before-train-step-hook-path", "runs in Megatron's trainer", nearest="loss.policy"),
    Hook("--custom-model-provider-path", "builds the model", nearest="model.path"),
    Hook("--custom-update-weight-post-write-path", "publishes weights", nearest="weights.transport = 'bus' needs no shared folder"),
    Hook("--custom-config-path", "is YAML for such code", nearest="producer.options, reward.options, filters.options"),
)


def key_of(hook: Hook) -> str:
    """The key in `[slime]`; empty where this version has none of this name."""
    name = hook.flag.removeprefix("--").replace("-", "_")
    table = next((field.type for field in msgspec.structs.fields(Config) if field.encode_name == "slime"), None)
    known = msgspec.structs.fields(table) if isinstance(table, type) else ()
    return f"slime.{name}" if any(field.encode_name == name for field in known) else ""


def flag_of(hook: Hook) -> Flag:
    """What becomes of it in this version."""
    kind = "switch" if hook.flag == "--group-rm" else "texts" if hook.flag == "--rollout-sample-hook-path" else "text"
    if key := key_of(hook):
        return Flag(hook.flag, kind, "mapped", hook.does, (key,))
    if hook.instead:
        keys = (hook.instead, "tasks.drop_zero_variance") if "filter" in hook.flag else (hook.instead,)
        says = f"the name of the function is kept, its signature is another: {hook.nearest}"
        return Flag(hook.flag, kind, "approximated", f"{says}; slime's own {NONZERO_STD} is a key" if len(keys) > 1 else says, keys)
    return Flag(hook.flag, kind, "refused", f"code that {hook.does} has no such place here", nearest=hook.nearest)
