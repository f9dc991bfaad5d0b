"""slime's metrics (THUDM/slime 624b824a), each with what says the same here, or why nothing does."""

from __future__ import annotations

from streamrl.telemetry.names import METRICS

SAME = (
    *("train/loss", "train/pg_loss", "train/entropy_loss", "train/pg_clipfrac", "train/ppo_kl", "train/kl_loss", "train/ois", "train/tis"),
    *("train/train_rollout_logprob_abs_diff", "train/tis_clipfrac", "train/tis_abs", "train/opsm_clipfrac", "train/opd_reverse_kl"),
    *("train/value_loss", "train/value_clipfrac", "train/grad_norm", "train/mis_training_log_ppl", "train/mis_training_ppl"),
    *("train/mis_rollout_log_ppl", "train/mis_rollout_ppl", "train/mis_kl", "train/mis_k3_kl", "train/mis_log_ppl_diff"),
    *("train/mis_ppl_ratio", "train/mis_chi2_token", "train/mis_chi2_seq", "train/mis_tis_truncate_fraction"),
    *("train/mis_rs_mask_fraction_low", "train/mis_rs_mask_fraction_high", "train/mis_rs_catastrophic_token_fraction"),
    *("train/mis_rs_catastrophic_seq_fraction", "train/mis_batch_norm_factor", "train/mis_is_ratio_mean_final"),
    *("train/mis_is_ratio_min_final", "train/mis_is_ratio_max_final"),
    *("rollout/raw_reward", "rollout/log_probs", "rollout/ref_log_probs", "rollout/rollout_log_probs", "rollout/returns"),
    *("rollout/advantages", "rollout/values", "rollout/kl", "rollout/response_lengths", "rollout/total_lengths"),
    *("rollout/response_len/mean", "rollout/response_len/median", "rollout/response_len/max", "rollout/response_len/min"),
    *("rollout/truncated_ratio", "rollout/spec_accept_rate", "rollout/spec_accept_length", "rollout/prefix_cache_hit_rate"),
    *("rollout/truncated", "train/global_batch_size"),
    *("perf/wait_time_ratio", "perf/train_wait_time", "perf/train_time", "perf/step_time"),
    *("perf/log_probs_time", "perf/ref_log_probs_time", "perf/actor_train_time", "perf/actor_train_tok_per_s"),
)
"""Names that mean the same in both."""

OTHERS = (
    ("train/lr-pg_{i}", "`train/lr`: there is one group of parameters"),
    ("train/step, rollout/step", "the columns `step` and `version` of every row"),
    ("train/mtp_loss, train/mtp_{i}_loss", "none: no multi-token prediction is trained; comes with Megatron-core"),
    ("rollout/rewards", "`rollout/advantages`: rewards are normalised there, and not stored"),
    ("rollout/zero_std/count_{reward}", "`rollout/zero_variance`, as a fraction and for all rewards together"),
    ("rollout/dynamic_filter/drop_{reason}", "`rollouts/dropped_total/` and the reason; a filter's own words count as `other`"),
    ("rollout/error_cat/{c}", "`rollouts/dropped_total/failed`, `timeout`, `poison`; the words are in `streamrl status`"),
    ("rollout/avg_cached_tokens_per_sample", "`engine/cached_tokens_total`, by window instead of by sample"),
    ("rollout/repetition_frac", "none yet: it takes the text of every answer, which no metric's way sees; comes with rewards and data"),
    ("rollout/correct_length/p25..p100, rollout/correct_entropy", "none yet; comes with rewards and data"),
    ("rollout/top_p_kept_vocab_per_token", "none: the sampler's vocabulary is not kept; log-probabilities are those under its top-p"),
    ("perf/rollout_time", "none: generation never begins or ends; `perf/wait_s` is what a batch waited for"),
    ("perf/tokens_per_gpu_per_sec", "`tokens/sampled_total` over a row's seconds; GPUs may come and go, so divide by yours"),
    ("perf/effective_tokens_per_gpu_per_sec", "`tokens/trained_total` over `perf/step_time`, likewise"),
    ("perf/longest_sample_tokens_per_sec", "none: no batch waits for its longest sample"),
    ("perf/non_generation_time/*", "`producer/share/tools`, `producer/share/reward` and the others, as parts of the slots' time"),
    ("perf/request/{e2e_latency,queue_time}/*, perf/decode/*, perf/prefill/*", "`engine/waiting_requests`; a SGLang server has its own"),
    ("perf/update_weights_time", "`weights/publish_s`, `lag/publish_to_commit_s`; what decoding stands still for is `engine/swap_ms`"),
    ("perf/update_weights_wire_bytes, perf/update_weights_density", "`weights/bytes_total`; over a version's bytes it is the density"),
    ("perf/{sleep,wake_up}_time", "none: trainer and engines do not take turns on a GPU"),
    ("perf/data_preprocess_time", "in `perf/step_s`: batches are packed while they arrive"),
    ("perf/save_model_time", "`trainer/checkpoint_s`: of a checkpoint, what the steps wait for"),
    ("perf/ref_model_update_time", "in `perf/step_s`: every `loss.kl.reference_every` batches the policy is copied"),
    ("perf/{log_probs,ref_log_probs,actor_train}_tflops", "none yet; comes with the trainer at full size"),
    ("eval/{name}, eval/{name}-truncated_ratio, eval/{name}-pass@k", "the same; the set of `data.heldout` is `eval/heldout`"),
    ("passrate/pass@k", "none: rollouts are trained on, and are no sample of a fixed set; a set of problems has its pass@k"),
    ("multi_turn/*", "none yet; comes with agents"),
)
"""Names and what is here instead. Ours are in code, theirs are not: a test holds what is in code to be declared."""


def slime_table() -> str:
    """A row for each of slime's names that is not ours; those that are, in one line before."""
    missing = [name for name in SAME if name not in METRICS]
    if missing:
        raise ValueError(f"expected declared names, got {', '.join(missing)}")
    same = ", ".join(f"`{name}`" for name in SAME)
    rows = [f"| {theirs} | {ours} |" for theirs, ours in OTHERS]
    return "\n".join([f"{len(SAME)} names are the same: {same}.", "", "| slime | here |", "|---|---|", *rows])
