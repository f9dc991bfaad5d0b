"""Every metric of streamrl: its name (`area/quantity_unit`), unit and reduction, declared here and nowhere else."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from streamrl.errors import SchemaError
from streamrl.schemas.ledger import FILTER
from streamrl.telemetry.conditions import CONDITIONS, CONSTANTS
from streamrl.telemetry.metric import Metric, Reduction
from streamrl.telemetry.set_names import set_metric
from streamrl.telemetry.states import DOWN, STATES, gpus_of, seconds, share

_MEAN, _SUM, _MAX, _LAST = Reduction.MEAN, Reduction.SUM, Reduction.MAX, Reduction.LAST

DROP_REASONS = (
    *("stale", "duplicate", "late", "failed", "filtered", "timeout", "deliveries", "poison", "zero_variance", "empty", "lost_version"),
    *("inexact", "truncated", "no_baseline", "unrewarded", "expired", "lost", "blob_missing", "superseded_reward"),
    *("too_short", "too_long", "repetitive", "too_hard", "too_easy", "row_too_long", "row_broken", FILTER),
)
"""Reasons that `streamrl.schemas.ledger.Drop` explains."""
PARENT_DISTANCE = "train/parent_logprob_abs_diff"
REMAX = 'tasks have a greedy rollout: `loss.advantage = "remax"`'
REWARDERS = "rewarders score: `reward.workers`"
OTHER_REASON = "other"
"""Stands for a producer's own words."""
DROPPED_SO_FAR = "rollouts/dropped_so_far"
"""The metric of all rollouts dropped since a run began; those of `dropped` are each batch's."""


LENGTHS: Mapping[str, str] = MappingProxyType(
    {
        "lengths/finished": "of the answers that producers have stored",
        "lengths/cut": "that completions had reached which were never stored: their rollout failed, timed out, expired or was given back",
        "lengths/trained": "of the answers in trained batches",
        "lengths/dropped": "of the answers that were stored and then decided against",
    }
)
"""Histograms of lengths in sampled tokens, by name (`streamrl.core.lengths`), and whose lengths they are."""


def length_quantile(name: str, quantile: str) -> str:
    """The metric of a quantile (`p50`, `p95`) of a histogram of lengths."""
    return f"{name}_{quantile}"


def _of_lengths() -> Iterator[Metric]:
    for name, whose in LENGTHS.items():
        for quantile, word in (("p50", "median"), ("p95", "95th percentile")):
            yield Metric(length_quantile(name, quantile), _LAST, "tokens", f"{word} of the newest lengths {whose}")


def counted_as(reason: str) -> str:
    """One of `DROP_REASONS` or `OTHER_REASON`: the words of the user's filters are counted together, and so are producers' own."""
    known = FILTER if reason.startswith(f"{FILTER}: ") else reason
    return known if known in DROP_REASONS else OTHER_REASON


def dropped(reason: str) -> str:
    """The metric that counts the rollouts of a batch that were dropped for a reason."""
    return f"rollouts/dropped_total/{counted_as(reason)}"


def dropped_tokens(reason: str) -> str:
    """The metric that counts the sampled tokens of the rollouts dropped for a reason."""
    return f"tokens/dropped_total/{counted_as(reason)}"


_TIMED = {
    "trainer": ("s", "rank 0's thread"),
    "engine": ("s", "the thread of an engine for rollouts"),
    "producer": ("slot s", "a slot for a task"),
}
"""By kind of worker: the unit of its seconds, and whose they are."""


def _of_states() -> Iterator[Metric]:
    for kind, states in STATES.items():
        unit, who = _TIMED[kind]
        for state, meaning in states.items():
            yield Metric(seconds(kind, state), _SUM, unit, f"time of {who}: {meaning}")
        for state, meaning in ({**states, DOWN: "was not there, or was not heard of"}).items():
            if state == DOWN:
                yield Metric(seconds(kind, state), _SUM, unit, f"time of a worker that {meaning}", when="a worker was away")
            yield Metric(share(kind, state), _LAST, "fraction", f"part of the window of {who}: {meaning}")


def _of_gateways() -> Iterator[Metric]:
    for name, reduction, unit, meaning in (
        ("gateway/open_sessions", _MEAN, "sessions", "sessions that agents have"),
        ("gateway/waiting_agents", _MEAN, "agents", "agents that wait for a session"),
        ("gateway/started_total", _SUM, "sessions", "sessions given to agents"),
        ("gateway/timeouts_total", _SUM, "sessions", "sessions that ended over a limit, those that nobody started included"),
        ("gateway/calls_total", _SUM, "calls", "calls answered"),
        ("gateway/refused_total", _SUM, "calls", "requests refused"),
        ("gateway/abandoned_total", _SUM, "turns", "turns that are not trained: not gone on with, and not the newest answer"),
    ):
        yield Metric(name, reduction, unit, meaning, when="the run has gateways")


AGE_PARTS = {
    "in_flight": "passed while it was generated",
    "queued": "passed between generation and training",
    "publish_lag": "the weights took to reach the engine",
}


def staleness_part(beginning: str, part: str, quantile: str) -> str:
    """The metric of a part of the ages of trained tokens (`beginning` is empty) or of samples' oldest trained tokens (`sample_`)."""
    return f"staleness/{beginning}{part}_{quantile}"


def _parts_of_ages() -> Iterator[Metric]:
    quantiles = {"p50": (_MEAN, "median"), "p95": (_MEAN, "95th percentile"), "max": (_MAX, "greatest")}
    for beginning, what in (("", "of the trained tokens' ages"), ("sample_", "of the ages of the samples' oldest trained tokens")):
        for part, meaning in AGE_PARTS.items():
            for quantile, (reduction, word) in quantiles.items():
                yield Metric(staleness_part(beginning, part, quantile), reduction, "versions", f"{word} of the part {what} that {meaning}")


_DECLARED = (
    # One value a batch; they also stand in the batch's ledger entry. Those of a loss are weighted as the loss is.
    Metric("rollout/raw_reward", _MEAN, "reward", "mean reward of the rollouts that arrived for the batch, dropped ones included"),
    Metric("rollout/length_reward", _MEAN, "reward", "what `reward.length` has added to the batch's rewards, mean over rollouts"),
    Metric("rollout/overlong_penalty", _MEAN, "reward", "what length has added to the batch's rewards (0 or less), mean over rollouts"),
    Metric("rollout/baseline_reward", _MEAN, "reward", "reward of the batch's greedy answers, mean over groups", when=REMAX),
    Metric("rollout/raw_reward_std", _MEAN, "reward", "standard deviation of the rewards within a group, mean over groups"),
    Metric("rollout/zero_variance", _MEAN, "fraction", "groups of the batch whose rewards are all equal, of remax the greedy one too"),
    Metric("rollout/dropped", _MEAN, "records", "drop records written with the batch"),
    Metric("rollout/tokens_trained", _MEAN, "tokens", "tokens of the batch under the loss mask"),
    Metric("rollout/truncated_ratio", _MEAN, "fraction", "samples of the batch that a length limit truncated, masked ones included"),
    Metric("rollout/truncated", _MEAN, "fraction", "slime's other name of `rollout/truncated_ratio`"),
    Metric("rollout/advantages", _MEAN, "1", "advantages, mean over a rollout's trained tokens, then over rollouts"),
    Metric("rollout/advantages_abs", _MEAN, "1", "their absolute values, likewise: 0 where a batch teaches nothing"),
    Metric("rollout/advantages_std", _MEAN, "1", "standard deviation of the advantages of the trained tokens"),
    Metric("rollout/advantages_min", _MEAN, "1", "least advantage of a trained token"),
    Metric("rollout/advantages_max", _MAX, "1", "greatest advantage of a trained token"),
    Metric("rollout/returns", _MEAN, "reward", "returns that the critic learns: mean over a rollout's trained tokens, then over rollouts"),
    Metric("rollout/values", _MEAN, "reward", "the critic's values, likewise"),
    Metric("rollout/kl", _MEAN, "nats", "distance from the reference that was taken off the rewards, before its coefficient, likewise"),
    Metric("rollout/log_probs", _MEAN, "nats", "the trainer's log-probabilities before the batch, likewise"),
    Metric("rollout/ref_log_probs", _MEAN, "nats", "the reference's log-probabilities, likewise"),
    Metric("rollout/rollout_log_probs", _MEAN, "nats", "the sampler's log-probabilities, likewise"),
    Metric("rollout/response_lengths", _MEAN, "tokens", "a sample's tokens from the first trained one on"),
    Metric("rollout/total_lengths", _MEAN, "tokens", "a sample's tokens, prompt included"),
    Metric("rollout/response_len/mean", _MEAN, "tokens", "trained tokens of a sample"),
    Metric("rollout/response_len/median", _MEAN, "tokens", "trained tokens of a sample, median"),
    Metric("rollout/response_len/max", _MAX, "tokens", "trained tokens of a sample, the most in the batch"),
    Metric("rollout/response_len/min", _MEAN, "tokens", "trained tokens of a sample, the least in the batch"),
    Metric("train/loss", _MEAN, "nats", "the loss that was minimised"),
    Metric("train/pg_loss", _MEAN, "nats", "its policy-gradient part, importance weights included"),
    Metric("train/pg_clipfrac", _MEAN, "fraction", "trained tokens whose ratio was clipped"),
    Metric("train/pg_dual_clipfrac", _MEAN, "fraction", "trained tokens of negative advantage whose loss met the second bound"),
    Metric("train/sapo_gate", _MEAN, "1", "weight of the gradient that SAPO's gate leaves"),
    Metric("train/ppo_kl", _MEAN, "nats", "log-probability before the batch minus the one after the step so far"),
    Metric("train/ois", _MEAN, "ratio", "probability under the policy over the one before the batch"),
    Metric("train/vespo_weight", _MEAN, "1", "weight of a sample's gradient"),
    Metric("train/m2", _MEAN, "nats^2", "(log pi - log mu)^2 of the trained tokens that their advantage pushes further from the sampler"),
    Metric("train/m2_kept", _MEAN, "nats^2", "the same of those that M2PO kept"),
    Metric("train/cov", _MEAN, "nats", "covariance of the trained tokens' log-probabilities and advantages"),
    Metric("train/cov_fraction", _MEAN, "fraction", "trained tokens that Clip-Cov detached or KL-Cov penalised"),
    Metric("train/top_entropy_threshold", _MEAN, "nats", "least entropy of a token whose policy loss counts"),
    Metric("train/top_entropy_fraction", _MEAN, "fraction", "trained tokens whose policy loss counts"),
    Metric("train/opsm_clipfrac", _MEAN, "fraction", "trained tokens in samples that OPSM masked"),
    Metric("train/kl_coef", _MEAN, "1", "coefficient of the distance from the reference, in the loss or in the rewards"),
    Metric("train/kl_loss", _MEAN, "nats", "distance from the reference in the loss, before its coefficient"),
    Metric("train/entropy_loss", _MEAN, "nats", "entropy of the policy at the trained tokens"),
    Metric("train/opd_reverse_kl", _MEAN, "nats", "log-probability under the policy minus the one under the teacher"),
    Metric("train/value_loss", _MEAN, "reward^2", "the critic's loss"),
    Metric("train/value_clipfrac", _MEAN, "fraction", "trained tokens whose value's loss was clipped"),
    Metric("train/value_grad_norm", _MEAN, "norm", "global gradient norm of the critic before clipping"),
    Metric("train/value_norm", _MEAN, "norm", "norm of the critic's parameters: a replay whose critic comes out otherwise shows it here"),
    Metric("train/grad_norm", _MEAN, "norm", "global gradient norm before clipping"),
    Metric("train/lr", _MEAN, "1", "learning rate"),
    Metric("train/expert_load_max", _MAX, "1", "choices of an expert in a layer over those of an even load: of all layers the most"),
    Metric("train/expert_load_min", _MEAN, "1", "the same of the expert that is chosen least: 0 if there is one that nobody chooses"),
    Metric("train/expert_load_entropy", _MEAN, "fraction", "entropy of the load of a layer's experts over that of an even one: the least"),
    Metric("train/balance_loss", _MEAN, "1", "balancing loss before its coefficient, mean over layers, 1 if even; not in `train/loss`"),
    Metric("train/router_z_loss", _MEAN, "nats^2", "squared logsumexp of the routers' logits, mean over layers; not in `train/loss`"),
    Metric(
        "train/support_replayed",
        _MEAN,
        "fraction",
        "trained tokens drawn under top-p, top-k or min-p that are normalised over what the engine drew them from",
    ),
    Metric(
        "train/likeliest_known", _MEAN, "fraction", "trained tokens drawn from the whole vocabulary whose likeliest the engine has said"
    ),
    Metric("train/routing_replayed", _MEAN, "fraction", "tokens of the batch that went to the experts that the engine had sent them to"),
    Metric("train/tokens_per_second", _MEAN, "1/s", "tokens of the batch, prompts included, over the time of its training step"),
    Metric("train/mfu", _MEAN, "fraction", "useful FLOPs of the batch over what the trainer's devices reach at most in the step's time"),
    Metric("train/global_batch_size", _MEAN, "samples", "samples of an optimizer step"),
    Metric("train/answer_probability", _MEAN, "probability", "mean probability of whole answers in a batch of the warm-up"),
    Metric("train/nonfinite_tokens", _SUM, "tokens", "trained tokens left out because a log-probability was not finite"),
    # Off-policy correction: rho is the probability before the batch (or, with `ratio = "current"`, now) over the sampler's.
    Metric("train/tis", _MEAN, "ratio", "rho of what is weighted (token, sample or geometric mean), before any bound"),
    Metric("train/tis_abs", _MEAN, "ratio", "its distance from 1"),
    Metric("train/tis_clipfrac", _MEAN, "fraction", "trained tokens whose importance weight met a bound"),
    Metric("train/train_rollout_logprob_abs_diff", _MEAN, "nats", "distance of the trainer's and the sampler's log-probabilities"),
    Metric("train/train_rollout_logprob_abs_diff_max", _MAX, "nats", "the greatest of these distances among the trained tokens"),
    Metric(
        "train/unlearned_total",
        _SUM,
        "batches",
        "batches that gave no gradient though one was due, or none that is finite",
    ),
    Metric("train/same_weights_logprob_abs_diff", _MEAN, "nats", "the distance where both had the same weights: rounding only, no drift"),
    Metric("train/same_weights_logprob_abs_diff_max", _MAX, "nats", "the greatest distance where both had the same weights"),
    Metric("train/same_weights_logprob_abs_diff_p99", _MAX, "nats", "99 % of the tokens are not further apart there"),
    Metric("train/same_weights_furthest_logprob", _MEAN, "nats", "the sampler's log-probability of the token that is furthest apart there"),
    Metric("train/float32_sampler_abs_diff_max", _MAX, "nats", "the sampler's distance from float32 in the rollout with that token"),
    Metric("train/float32_trainer_abs_diff_max", _MAX, "nats", "the trainer's distance from float32 in that rollout"),
    Metric(
        *(PARENT_DISTANCE, _MEAN, "nats"),
        "of a branch: distance of its log-probabilities from its parent's, each as they were when the same samples were trained",
        when="a branch of a run whose `tokens/` still has the batch",
    ),
    Metric("train/rejected_fraction", _MEAN, "fraction", "trained tokens left out by rejection, veto, age or the correction's mask"),
    Metric("train/stale_masked_fraction", _MEAN, "fraction", "trained tokens older than `mask_staleness`"),
    Metric("train/staleness_weight", _MEAN, "1", "factor on a weight by its token's age"),
    Metric("train/ratio_p1", _MEAN, "ratio", "first percentile of rho over trained tokens"),
    Metric("train/ratio_p50", _MEAN, "ratio", "median of rho over trained tokens"),
    Metric("train/ratio_p99", _MEAN, "ratio", "99th percentile of rho over trained tokens"),
    Metric("train/ratio_max", _MAX, "ratio", "the greatest rho of a trained token"),
    Metric("train/ess_token", _MEAN, "fraction", "effective sample size of the tokens' rho over the number of tokens"),
    Metric("train/ess_sequence", _MEAN, "fraction", "effective sample size of the samples' product of rho over the number of samples"),
    Metric("train/ess_weights", _MEAN, "fraction", "effective sample size of the weights that were used over the number of tokens"),
    Metric("train/grad_cosine", _MEAN, "1", "cosine between the gradients of consecutive optimizer steps, before clipping"),
    Metric("train/ess_rollout", _MEAN, "fraction", "effective sample size of a step's rollouts over their number; it scales `train/lr`"),
    Metric("train/mis_training_log_ppl", _MEAN, "nats", "log-perplexity of a sample under the trainer's policy"),
    Metric("train/mis_training_ppl", _MEAN, "1", "perplexity of a sample under the trainer's policy"),
    Metric("train/mis_rollout_log_ppl", _MEAN, "nats", "log-perplexity of a sample under the sampler's policy"),
    Metric("train/mis_rollout_ppl", _MEAN, "1", "perplexity of a sample under the sampler's policy"),
    Metric("train/mis_log_ppl_diff", _MEAN, "nats", "training minus rollout log-perplexity of a sample"),
    Metric("train/mis_log_ppl_abs_diff", _MEAN, "nats", "size of that difference"),
    Metric("train/mis_log_ppl_diff_max", _MAX, "nats", "the greatest such difference"),
    Metric("train/mis_ppl_ratio", _MEAN, "ratio", "training over rollout perplexity of a sample"),
    Metric("train/mis_kl", _MEAN, "nats", "divergence of the trainer's policy from the sampler's: -log rho"),
    Metric("train/mis_k3_kl", _MEAN, "nats", "the same, estimated by rho - 1 - log rho"),
    Metric("train/mis_chi2_token", _MEAN, "1", "chi-squared divergence at tokens: rho^2 - 1"),
    Metric("train/mis_chi2_seq", _MEAN, "1", "chi-squared divergence of samples: squared product of rho, minus 1"),
    Metric("train/mis_tis_truncate_fraction", _MEAN, "fraction", "trained tokens whose weight was cut to the upper bound"),
    Metric("train/mis_tis_clip_fraction_low", _MEAN, "fraction", "trained tokens whose weight was raised to the lower bound"),
    Metric("train/mis_tis_clip_fraction_high", _MEAN, "fraction", "trained tokens whose weight was cut to the upper bound"),
    Metric("train/mis_tis_mask_fraction_low", _MEAN, "fraction", "trained tokens with weight 0 because rho was below the lower bound"),
    Metric("train/mis_tis_mask_fraction_high", _MEAN, "fraction", "trained tokens with weight 0 because rho was above the upper bound"),
    Metric("train/mis_rs_mask_fraction_low", _MEAN, "fraction", "trained tokens rejected below the lower bound"),
    Metric("train/mis_rs_mask_fraction_high", _MEAN, "fraction", "trained tokens rejected above the upper bound"),
    Metric("train/mis_rs_catastrophic_token_fraction", _MEAN, "fraction", "trained tokens whose rho is below the veto"),
    Metric("train/mis_rs_catastrophic_seq_fraction", _MEAN, "fraction", "trained tokens in samples with such a token"),
    Metric("train/mis_batch_norm_factor", _MEAN, "1", "what normalisation multiplied the weights by"),
    Metric("train/mis_is_ratio_mean_final", _MEAN, "1", "the weights that were used, mean over trained tokens"),
    Metric("train/mis_is_ratio_min_final", _MEAN, "1", "the least of them in the batch"),
    Metric("train/mis_is_ratio_max_final", _MAX, "1", "the greatest of them"),
    Metric("staleness/mean", _MEAN, "versions", "mean age of the trained tokens"),
    Metric("staleness/p50", _MEAN, "versions", "median age of the trained tokens"),
    Metric("staleness/p95", _MEAN, "versions", "95th percentile of the trained tokens' ages"),
    Metric("staleness/p99", _MEAN, "versions", "99th percentile of the trained tokens' ages"),
    Metric("staleness/max", _MAX, "versions", "greatest age of the trained tokens"),
    Metric("staleness/sample_mean", _MEAN, "versions", "mean age of the samples' oldest trained tokens"),
    Metric("staleness/sample_p50", _MEAN, "versions", "median age of the samples' oldest trained tokens"),
    Metric("staleness/sample_p95", _MEAN, "versions", "95th percentile of the ages of the samples' oldest trained tokens"),
    Metric("staleness/sample_max", _MAX, "versions", "greatest age of a sample's oldest trained token"),
    Metric("staleness/in_flight", _MEAN, "versions", "part of the age that passed while tokens were generated"),
    Metric("staleness/queued", _MEAN, "versions", "part of the age that passed between generation and training"),
    Metric("staleness/publish_lag", _MEAN, "versions", "part of the age that the weights took to reach the engine"),
    *_parts_of_ages(),
    Metric("perf/step_s", _MEAN, "s", "time of the training step"),
    Metric("perf/wait_s", _MEAN, "s", "time the trainer waited for a batch"),
    Metric("perf/step_time", _MEAN, "s", "time of a batch, waiting for it included: `perf/wait_s` and `perf/step_s`"),
    Metric("perf/train_time", _MEAN, "s", "slime's name of `perf/step_s`"),
    Metric("perf/train_wait_time", _MEAN, "s", "slime's name of `perf/wait_s`"),
    Metric("perf/log_probs_time", _MEAN, "s", "part of `perf/step_s` in which the policy scored the batch before its first step"),
    Metric("perf/ref_log_probs_time", _MEAN, "s", "part of `perf/step_s` in which the reference scored the batch"),
    Metric("perf/actor_train_time", _MEAN, "s", "part of `perf/step_s` of passes with gradients and of optimizers, a critic's included"),
    Metric(
        *("perf/checkpoint_wait_s", _MEAN, "s"),
        "part of `perf/step_s` in which the optimizer waited until the checkpoint before it had been copied to the host",
        when="a checkpoint was begun before the batch",
    ),
    Metric("perf/actor_train_tok_per_s", _MEAN, "1/s", "the batch's tokens, prompts included, over `perf/actor_train_time`"),
    Metric("perf/wait_time_ratio", _MEAN, "fraction", "part of a batch's time in which the trainer waited for it"),
    # What the fold of a run makes of its ledger, events and presence (`streamrl.monitor`); no worker reports these.
    Metric("eval/heldout", _MEAN, "fraction", "held-out problems answered right, by version"),
    Metric("tokens/sampled_total", _SUM, "tokens", "tokens that engines for rollouts have sampled"),
    Metric(
        *("tokens/cut_total", _SUM, "tokens"),
        "tokens sampled and never stored: of rollouts that failed, timed out, expired or were given back",
    ),
    Metric("tokens/trained_total", _SUM, "tokens", "tokens under the loss mask of the batch; none of the warm-up"),
    Metric(DROPPED_SO_FAR, _LAST, "rollouts", "rollouts decided against since the run began, for whatever reason"),
    *(
        Metric(dropped(reason), _SUM, "rollouts", f"rollouts decided against: `{reason}`", when="there were some")
        for reason in (*DROP_REASONS, OTHER_REASON)
    ),
    *(
        Metric(dropped_tokens(reason), _SUM, "tokens", f"sampled tokens of the rollouts dropped as `{reason}`", when="there were some")
        for reason in (*DROP_REASONS, OTHER_REASON)
    ),
    Metric("tokens/stored_total", _SUM, "tokens", "sampled tokens that the trainer found on the sample stream since the batch before"),
    Metric("tokens/masked_total", _SUM, "tokens", "sampled tokens of the batch that are not under its loss mask"),
    Metric("tokens/waiting", _LAST, "tokens", "sampled tokens that waited for their group or their batch when this one was closed"),
    Metric("tokens/evaluated_total", _SUM, "tokens", "tokens that engines for rollouts have sampled for evaluations"),
    Metric(
        *("tokens/open", _LAST, "tokens"),
        "tokens sampled since the start of `up` and not stored, cut or evaluated yet: being made, or gone with a killed process",
    ),
    Metric("rollout/spec_accept_rate", _MEAN, "fraction", "drafted tokens that were accepted (speculative decoding)"),
    Metric("rollout/spec_accept_length", _MEAN, "tokens", "tokens of a pass that verified drafts: the accepted ones and its own"),
    Metric("rollout/prefix_cache_hit_rate", _MEAN, "fraction", "prompt tokens that were in the engines' prefix cache"),
    Metric("lag/stream_s", _LAST, "s", "age of the oldest message behind the newest batch's cursor"),
    Metric("lag/publish_to_commit_s", _MEAN, "s", "time from a version's manifest to an engine's commit, between two hosts' clocks"),
    Metric("lag/publish_to_commit_max_s", _MAX, "s", "the longest of these times"),
    Metric("lag/stream_messages", _LAST, "messages", "messages on the sample stream behind the newest batch's cursor"),
    Metric(
        *("lag/stream_tokens", _LAST, "tokens"),
        "sampled tokens on the sample stream that are neither trained nor dropped, about: of new messages the mean length is known",
    ),
    Metric(
        "lag/versions_behind", _LAST, "versions", "versions between the newest and the one an engine serves; of the run: the worst engine's"
    ),
    # Whether long answers are trained as often as short ones.
    *_of_lengths(),
    Metric(
        *("lengths/distance", _LAST, "fraction"),
        "Kolmogorov-Smirnov distance of the newest lengths trained from those trained, dropped or cut; 0: none is treated otherwise",
    ),
    # Where time goes. The seconds come from workers, the shares from the fold; the shares of a kind add up to one.
    *_of_states(),
    Metric("producer/slots", _LAST, "slots", "tasks that a producer can have in hand"),
    Metric(gpus_of("trainer"), _LAST, "GPUs", "GPUs that the trainer's ranks compute on; 0: they are on the CPU"),
    Metric(gpus_of("engine"), _LAST, "GPUs", "GPUs that an engine for rollouts computes on; 0: it is on the CPU"),
    Metric("engine/saturated_s", _SUM, "s", "time in which all slots were busy and requests waited for one"),
    Metric("starvation/trainer", _LAST, "fraction", "part of the window in which the trainer's rank 0 waited for samples"),
    Metric("starvation/producers", _LAST, "fraction", "part of the slots' window in which they were free for want of credit"),
    Metric("starvation/engines_idle", _LAST, "fraction", "part of the window of engines for rollouts without requests"),
    Metric("starvation/engines_saturated", _LAST, "fraction", "part of these engines' window with all slots busy and requests waiting"),
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
    Metric("tokens/published_total", _SUM, "tokens", "sampled tokens of the rollouts that producers have stored"),
    Metric("tokens/greedy_total", _SUM, "tokens", "of the greedy rollouts that producers have stored: never trained", when=REMAX),
    Metric("producer/failures_total", _SUM, "tasks", "tasks given back or ended as failed"),
    Metric("producer/in_flight_tasks", _MEAN, "tasks", "tasks being rolled out"),
    Metric("rewarder/graded_total", _SUM, "rollouts", "rewards that a rewarder has published", when=REWARDERS),
    Metric("rewarder/failed_total", _SUM, "rollouts", "rollouts that a rewarder has ended: their grading failed", when=REWARDERS),
    Metric("rewarder/group_s", _MEAN, "s", "from the claim of a group to its rewards, without the time to store them", when=REWARDERS),
    Metric("rewarder/in_flight_groups", _MEAN, "groups", "that a rewarder scores", when=REWARDERS),
    Metric("rewarder/waiting_groups", _LAST, "groups", "requests for rewards in the queue, those in flight included", when=REWARDERS),
    Metric("producer/hung_tasks", _MEAN, "tasks", "tasks whose code has had a third of its time limit without asking an engine"),
    Metric("producer/hung_s", _MAX, "s", "the longest of these times"),
    Metric("reward/hung", _MEAN, "calls", "calls of a custom reward that take far longer than others"),
    Metric("reward/hung_s", _MAX, "s", "the longest of these times"),
    Metric("reward/ended_early_total", _SUM, "calls", "of them, calls that were ended before `reward.timeout_s`, as too many hung"),
    *_of_gateways(),
    Metric("feeder/issued_total", _SUM, "tasks", "tasks issued"),
    Metric("feeder/row_too_long_total", _SUM, "tasks", "tasks issued whose prompt has more than data.max_prompt_tokens tokens"),
    Metric("feeder/row_broken_total", _SUM, "tasks", "tasks issued whose row cannot be used"),
    # The message bus.
    Metric("bus/redelivered_total", _SUM, "messages", "tasks delivered more than once"),
    Metric("bus/full_total", _SUM, "messages", "publications that waited for room"),
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: replace(metric, when=metric.when or CONDITIONS.get(metric.name, ""), stays=CONSTANTS.get(metric.name, ""))
        for metric in _DECLARED
    }
)
"""The declared metrics by name."""


BY_ENGINE = ("train/same_weights_logprob_abs_diff",)
"""Metrics that also exist for each worker that runs an engine, as `NAME/WORKER`."""
MOST_ENGINES = 256
"""Workers of which they exist in one batch."""
_WORKER = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def of_engine(name: str, engine: str) -> str:
    """A metric of `BY_ENGINE` for the worker that runs an engine: `engine-0` of `engine-0-1f2e3d`, or the address of a foreign one."""
    worker = "-".join(engine.split("-")[:2])[:64]
    return f"{name}/{re.sub(r'[^A-Za-z0-9_.:-]', '_', worker) or 'unknown'}"


REWARD_PART = Metric(
    *("rollout/reward_part/{part}", _MEAN, "reward", "part `{part}` of the rewards, mean over the samples of the batch that have it"),
    when="rewards come in named parts from producers",
)
"""The form of its name, in which `{part}` stands for the part."""
_PART_OF = REWARD_PART.name.partition("{")[0]


def reward_part(part: str) -> str:
    """The metric of a part of the rewards; letters that no name has are written as `_`."""
    return _PART_OF + (re.sub(r"[^A-Za-z0-9_.:-]", "_", part)[:64] or "_")


def declared(name: str) -> Metric | None:
    """The declaration of `name`, also of a set of problems, a part of the rewards or an engine, or None."""
    if (found := METRICS.get(name) or set_metric(name)) is not None:
        return found
    stem, _, worker = name.rpartition("/")
    if name.startswith(_PART_OF):
        meaning = REWARD_PART.meaning.format(part=worker)
        return replace(REWARD_PART, name=name, meaning=meaning) if reward_part(worker) == name else None
    if stem not in BY_ENGINE or not _WORKER.fullmatch(worker):
        return None
    return replace(METRICS[stem], name=name, meaning=f"{METRICS[stem].meaning}; of what {worker} sampled")


def metric(name: str) -> Metric:
    """The declaration of `name`; raises SchemaError with the nearest declared name if there is none."""
    found = declared(name)
    if found is None:
        near = difflib.get_close_matches(name, METRICS, n=1)
        advice = f"did you mean '{near[0]}'? " if near else ""
        raise SchemaError(
            f"expected the name of a declared metric, got {name!r}",
            hint=f"{advice}new metrics are declared in streamrl/telemetry/names.py",
            name=name,
        )
    return found
