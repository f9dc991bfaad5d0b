"""Every metric of streamrl: its name (`area/quantity_unit`), unit and reduction, declared here and nowhere else."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from streamrl.errors import SchemaError


class Reduction(StrEnum):
    """How several values of one metric become one."""

    MEAN = "mean"
    """Arithmetic mean."""
    SUM = "sum"
    """Amounts since the previous report add up."""
    MAX = "max"
    """The largest."""
    LAST = "last"
    """The newest."""


class Metric(msgspec.Struct, frozen=True):
    """One declared metric."""

    name: str
    reduction: Reduction
    unit: str
    meaning: str


_MEAN, _SUM, _MAX = Reduction.MEAN, Reduction.SUM, Reduction.MAX

_DECLARED = (
    # One value a batch; they also stand in the batch's ledger entry.
    Metric("rollout/raw_reward", _MEAN, "reward", "mean reward of the rollouts that arrived for the batch, dropped ones included"),
    Metric("rollout/raw_reward_std", _MEAN, "reward", "standard deviation of the rewards within a group, mean over groups"),
    Metric("rollout/zero_spread", _MEAN, "fraction", "groups of the batch whose rewards are all equal"),
    Metric("rollout/dropped", _MEAN, "records", "drop records written with the batch"),
    Metric("rollout/tokens_trained", _MEAN, "tokens", "tokens of the batch under the loss mask"),
    Metric("train/loss", _MEAN, "nats", "the loss that was minimised"),
    Metric("train/pg_loss", _MEAN, "nats", "its policy-gradient part, importance weights included"),
    Metric("train/pg_clipfrac", _MEAN, "fraction", "trained tokens whose ratio was clipped"),
    Metric("train/ppo_kl", _MEAN, "nats", "log-probability before the batch minus the one after the step so far"),
    Metric("train/ois", _MEAN, "ratio", "probability under the policy over the one before the batch"),
    Metric("train/tis", _MEAN, "ratio", "probability before the batch over the sampler's, before truncation"),
    Metric("train/tis_abs", _MEAN, "ratio", "its distance from 1"),
    Metric("train/tis_clipfrac", _MEAN, "fraction", "trained tokens whose importance weight was truncated"),
    Metric("train/train_rollout_logprob_abs_diff", _MEAN, "nats", "distance of the trainer's and the sampler's log-probabilities"),
    Metric("train/train_rollout_logprob_abs_diff_max", _MAX, "nats", "the greatest of these distances among the trained tokens"),
    Metric("train/same_weights_logprob_abs_diff", _MEAN, "nats", "the distance where both had the same weights: rounding only, no drift"),
    Metric("train/same_weights_logprob_abs_diff_max", _MAX, "nats", "the greatest distance where both had the same weights"),
    Metric("train/same_weights_logprob_abs_diff_p99", _MAX, "nats", "99 % of the tokens are not further apart there"),
    Metric("train/same_weights_logprob_at_max", _MEAN, "nats", "the sampler's log-probability of the token that is furthest apart there"),
    Metric("train/float32_sampler_abs_diff_max", _MAX, "nats", "the sampler's distance from float32 in the rollout with that token"),
    Metric("train/float32_trainer_abs_diff_max", _MAX, "nats", "the trainer's distance from float32 in that rollout"),
    Metric("train/entropy_loss", _MEAN, "nats", "entropy of the policy at the trained tokens"),
    Metric("train/grad_norm", _MEAN, "norm", "global gradient norm before clipping"),
    Metric("train/lr", _MEAN, "1", "learning rate"),
    Metric("train/answer_probability", _MEAN, "probability", "smoothed probability of whole answers during the warm-up"),
    Metric("staleness/p50", _MEAN, "versions", "median age of the trained tokens"),
    Metric("staleness/mean", _MEAN, "versions", "mean age of the trained tokens"),
    Metric("staleness/max", _MAX, "versions", "greatest age of the trained tokens"),
    Metric("staleness/in_flight", _MEAN, "versions", "part of the age that passed while tokens were generated"),
    Metric("staleness/queued", _MEAN, "versions", "part of the age that passed between generation and training"),
    Metric("staleness/publish_lag", _MEAN, "versions", "part of the age that the weights took to reach the engine"),
    Metric("perf/step_s", _MEAN, "s", "time of the training step"),
    Metric("perf/wait_s", _MEAN, "s", "time the trainer waited for a batch"),
    # Engines.
    Metric("engine/tokens_total", _SUM, "tokens", "tokens sampled"),
    Metric("engine/running_requests", _MEAN, "requests", "completions being decoded"),
    Metric("engine/waiting_requests", _MEAN, "requests", "completions that wait for a slot or a version"),
    Metric("engine/prompt_tokens_total", _SUM, "tokens", "prompt tokens of ended completions"),
    Metric("engine/cached_tokens_total", _SUM, "tokens", "those of them that were in the prefix cache"),
    Metric("engine/retractions_total", _SUM, "requests", "requests whose keys and values were given up and computed again"),
    Metric("engine/verify_passes_total", _SUM, "passes", "passes that verified drafted tokens (speculative decoding)"),
    Metric("engine/drafted_tokens_total", _SUM, "tokens", "tokens drafted"),
    Metric("engine/accepted_drafts_total", _SUM, "tokens", "drafted tokens that were accepted"),
    Metric("engine/inexact_completions_total", _SUM, "completions", "completions whose versions may be off by tokens (no plugin)"),
    Metric("engine/server_running_requests", _MEAN, "requests", "completions in the server's batch"),
    Metric("engine/server_waiting_requests", _MEAN, "requests", "completions in the server's own queue"),
    Metric("engine/kv_cache_used", _MEAN, "fraction", "part of the server's KV cache in use"),
    Metric("engine/restarts_total", _SUM, "restarts", "servers started for ones that had died"),
    Metric("engine/swaps_total", _SUM, "swaps", "weight versions committed"),
    Metric("engine/swap_ms", _MAX, "ms", "time of a commit between two forward passes"),
    Metric("weights/publish_s", _MEAN, "s", "time from a version's snapshot to its manifest"),
    Metric("weights/stage_s", _MEAN, "s", "time in which an engine staged a version in the background"),
    Metric("weights/bytes_total", _SUM, "bytes", "weight bytes published or staged"),
    # Producers and the feeder.
    Metric("producer/tasks_total", _SUM, "tasks", "tasks ended by this producer"),
    Metric("producer/rollouts_total", _SUM, "rollouts", "rollouts published"),
    Metric("producer/failures_total", _SUM, "tasks", "tasks given back or ended as failed"),
    Metric("producer/in_flight_tasks", _MEAN, "tasks", "tasks being rolled out"),
    Metric("feeder/issued_total", _SUM, "tasks", "tasks issued"),
    # The message bus.
    Metric("bus/redelivered_total", _SUM, "messages", "tasks delivered more than once"),
    Metric("bus/reconnects_total", _SUM, "reconnects", "connections made anew"),
    Metric("bus/full_total", _SUM, "messages", "publications that waited for room"),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _DECLARED})
"""The declared metrics by name."""


def metric(name: str) -> Metric:
    """The declaration of `name`; raises SchemaError with the nearest declared name if there is none."""
    found = METRICS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, METRICS, n=1)
        advice = f"did you mean '{near[0]}'? " if near else ""
        raise SchemaError(
            f"expected the name of a declared metric, got {name!r}",
            hint=f"{advice}new metrics are declared in streamrl/telemetry/names.py",
            name=name,
        )
    return found
