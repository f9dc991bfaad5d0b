"""What is known of slime's hooks without running any: their signatures, what they are here, and which have no place and why.

docs/slime-hooks.md is made from these tables (`make docs`), and so are the refusals and what `streamrl check-hook` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class Hook(msgspec.Struct, frozen=True, kw_only=True):
    """A function of slime's that has a place here."""

    takes: tuple[str, ...]
    """Arguments by place."""
    named: tuple[str, ...] = ()
    """Arguments by name, always given."""
    optional: tuple[str, ...] = ()
    """Arguments by name, given where the function takes them."""
    form: str
    """`async`, `plain`, or `either`."""
    gives: str
    becomes: str
    """The key of ours that it stands at."""
    differs: str
    """From slime."""

    @property
    def is_in_trainer(self) -> bool:
        """Whether the trainer calls it, with an `args` of what the section `loss` says."""
        return self.becomes.startswith("loss.")

    @property
    def signature(self) -> str:
        """As it is written in Python."""
        parts = [*self.takes, *(("*", *self.named) if self.named else ()), *(f"{name}=..." for name in self.optional)]
        return f"{'async ' if self.form == 'async' else ''}def name({', '.join(parts)}) -> {self.gives}"


_LOGPROBS = ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
HOOKS: Mapping[str, Hook] = MappingProxyType(
    {
        "custom_generate_function_path": Hook(
            takes=("args", "sample", "sampling_params"),
            optional=("evaluation",),
            form="async",
            gives="Sample | list[Sample]",
            becomes="producer.function",
            differs="engines are asked by `slime.utils.http_utils.post`, and what they give is recorded: a token with loss mask 1 that "
            "none of them gave fails the rollout. `ABORTED` fails it too (there is no buffer to go back to), and `remove_sample` "
            "leaves it out; the samples of a list share the reward of the last",
        ),
        "rollout_function_path": Hook(
            takes=("args", "rollout_id", "data_source"),
            named=("evaluation",),
            form="plain",
            gives="RolloutFnTrainOutput | list[list[Sample]]",
            becomes="producer.function",
            differs="a rollout is one task here: `args.rollout_batch_size` is 1, `rollout_id` the task's index, `get_samples` gives its "
            "group once and then nothing. Samples that are not given back, or with `remove_sample`, end as `filtered`. Not with "
            '`loss.advantage = "remax"`: a request does not say whether it is for the greedy rollout',
        ),
        "rollout_sample_hook_path": Hook(
            takes=("args", "sample"),
            optional=("rollout_id", "evaluation"),
            form="either",
            gives="Sample | None",
            becomes="producer.function",
            differs="`rollout_id` is None: tasks are in no rollout of a batch. A list of paths, called in order. `remove_sample` "
            "leaves the sample out, as in `rollout_sample_filter_path`",
        ),
        "custom_rm_path": Hook(
            takes=("args", "sample"),
            form="async",
            gives="float | dict",
            becomes="reward.kind",
            differs="runs in a process that is killed beyond `reward.timeout_s`; what raises, and NaN, fails the rollout and is no 0. Of a "
            "dict the numbers are kept as parts, `reward.key` names the one that is trained. `reward.options` come as keyword arguments",
        ),
        "dynamic_sampling_filter_path": Hook(
            takes=("args", "samples"),
            form="plain",
            gives="DynamicFilterOutput | bool",
            becomes="filters.function",
            differs="what is refused ends as a tombstone with the reason, and the feeder issues another task. Scored rollouts only: those "
            "that failed are not shown. `tasks.drop_zero_variance` is slime's `check_reward_nonzero_std` and is on",
        ),
        "rollout_sample_filter_path": Hook(
            takes=("args", "groups"),
            form="plain",
            gives="None",
            becomes="filters.function",
            differs="called with one group at a time, when it is complete. A rollout with `remove_sample` is left out of its group; in "
            "slime its tokens are masked and its reward still counts there",
        ),
        "rollout_all_samples_process_path": Hook(
            takes=("args", "all_groups", "data_source"),
            form="plain",
            gives="None",
            becomes="filters.function",
            differs="called with one group at a time; changes of its samples have no effect; `data_source` refuses to give more",
        ),
        "custom_reward_post_process_path": Hook(
            takes=("args", "samples"),
            form="plain",
            gives="(raw_rewards, rewards)",
            becomes="loss.advantage",
            differs="runs in the trainer, on the groups of a batch; the samples have tokens, masks, log-probs, rewards, status, `index`, "
            "`group_index`, and no text and no metadata. `rewards` become the advantages of all trained tokens, raw rewards stay as they "
            "were recorded",
        ),
        "custom_advantage_function_path": Hook(
            takes=("args", "rollout_data"),
            form="plain",
            gives="None",
            becomes="loss.advantage",
            differs="sets `rollout_data['advantages']`: tensors over the responses. `args` has what the section `loss` says. `returns` are "
            "not learnt from",
        ),
        "custom_tis_function_path": Hook(
            takes=(),
            named=("args", *_LOGPROBS),
            form="plain",
            gives="(pg_loss, masks, metrics)",
            becomes="loss.policy",
            differs='around the policy loss `ppo`, with `loss.correction.kind = "none"`; not with the table trainer. Lists hold trained '
            "tokens alone, so that `total_lengths` are `response_lengths`. Masked tokens keep their place in the denominators",
        ),
        "custom_loss_function_path": Hook(
            takes=("args", "batch", "logits", "sum_of_sample_mean"),
            form="plain",
            gives="(loss, metrics)",
            becomes="loss.slime_loss",
            differs="docs/training.md",
        ),
    }
)

_LOOP = "nobody waits for a rollout of a batch: rows are issued one by one by credits, and unfinished ones go on across versions"
_MEGATRON = "the trainer is built on megatron-core alone and hands out no `megatron.training` state"
REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "buffer_filter_path": (
            f"there is no buffer of aborted or left-over groups to choose from; {_LOOP}",
            "data.curriculum weighs sources as the run goes on; tasks.stale says what becomes of old groups",
        ),
        "data_source_path": (
            "rows are found again by their place after a crash, in training and in replay, which an object with a state of its own cannot "
            f"promise; {_LOOP}",
            "data.train reads JSONL, Parquet and Hub data sets, data.sources mixes several, data.curriculum weighs them",
        ),
        "eval_function_path": (
            "it loads data sets by itself and gives numbers; here the evaluator asks problem by problem, pinned to a version, resumes "
            "after a crash and keeps every answer",
            '[[evaluation.sets]] with function = "slime:file.py:generate" and a reward of its own',
        ),
        "custom_convert_samples_to_train_data_path": (
            "what is trained stands in the stream, so that a replay packs the same batch without anybody's code",
            "loss.slime_loss and slime.custom_advantage_function_path see the packed batch; slime.rollout_sample_hook_path changes samples",
        ),
        "rollout_data_postprocess_path": (
            "a batch is what the ledger says was trained; nothing changes it between the two",
            "slime.custom_advantage_function_path sees log-probs and sets advantages (0 trains nothing); slime.rollout_sample_hook_path "
            "changes masks",
        ),
        "custom_rollout_log_function_path": (
            "metrics are records on the bus that any number of readers show, without the samples and without a way to hold others back",
            "metrics.sinks (W&B, TensorBoard, trackio, Prometheus), `streamrl metrics`, or numbers of your own as parts of a reward",
        ),
        "custom_eval_rollout_log_function_path": (
            "as custom_rollout_log_function_path",
            "metrics.sinks; every answer is in evaluations/ of the run directory",
        ),
        "custom_pg_loss_reducer_function_path": (
            "each token's weight is fixed before the batch is cut into micro-batches and ranks, which a function of one cannot know",
            'loss.reduction, of which "constant_length" with loss.constant_length is the divisor of Dr.GRPO; or loss.slime_loss',
        ),
        "custom_megatron_init_path": (_MEGATRON, "a trainer of your own is a backend: docs/megatron.md"),
        "custom_megatron_before_log_prob_hook_path": (_MEGATRON, "slime.custom_loss_function_path sees the logits (torch trainer)"),
        "custom_megatron_before_train_step_hook_path": (_MEGATRON, "trainer.optimizer has schedules; slime.custom_loss_function_path"),
        "custom_model_provider_path": (_MEGATRON, 'trainer.backend = "torch" trains any causal model of transformers at model.path'),
        "custom_update_weight_post_write_path": (
            "engines fetch versions by themselves and swap between two forward passes: no directory is written that all have to load",
            "the events of engines on the bus say which version each serves (docs/weights.md)",
        ),
        "custom_config_path": (
            "the configuration is one file",
            "put values of your own into [slime] custom_config, from which `args` has them outside of the trainer",
        ),
    }
)
"""By name: why not, and what is nearest."""
