"""Under which condition a metric exists that not every run has, and why one may keep its value.

The others are in any run of the defaults, and move once something happens to it: tests/monitor/test_names_live.py sees both.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_CRITIC = 'there is a critic: `loss.advantage = "ppo"`'
_TORCH = 'the trainer computes them: `trainer.backend = "torch"`'
_TIMES = 'the trainer measures it: `trainer.backend = "torch"`'
_SCORED = "the policy is scored before its first step: `trainer.minibatches` above 1, `loss.correction.normalize`, and with some estimators"
_KEPT_KL = "the policy is held to a reference: `loss.kl`"
_KL_REWARD = "the KL is taken off the rewards: `loss.kl.reward_coef`"
_KL_LOSS = "the KL is in the loss: `loss.kl.loss_coef`"
_FLOAT32 = "`trainer.check_logprobs` looks closer"
_REJECTS = "`loss.correction.reject` has such a bound"
_VETO = "`loss.correction.veto` is set"
_SGLANG = 'engines are servers: `engine.kind = "sglang"`'
_DRAFTS = "they decode speculatively (`engine.sglang.flags`)"
_EXPERTS = "the policy is a mixture of experts whose routers are known: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, Qwen3-Next"
_HELD_OUT = "there are held-out problems: `data.heldout`, `[[evaluation.sets]]`"

CONDITIONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("rollout/returns", "rollout/values", "train/value_loss", "train/value_clipfrac", "train/value_grad_norm"), _CRITIC
        ),
        "train/value_norm": _CRITIC,
        **dict.fromkeys(("rollout/log_probs", "rollout/rollout_log_probs"), _TORCH),
        **dict.fromkeys(("perf/actor_train_time", "perf/actor_train_tok_per_s"), _TIMES),
        "perf/log_probs_time": _SCORED,
        "perf/ref_log_probs_time": _KEPT_KL,
        **{"rollout/kl": _KL_REWARD, "train/kl_loss": _KL_LOSS, "rollout/ref_log_probs": _KEPT_KL},
        "rollout/length_reward": "`reward.length.kind` is set",
        "train/kl_coef": "it is not constant: `loss.kl.target`, `loss.kl.decay_steps`",
        "rollout/overlong_penalty": "a penalty on long answers: `reward.overlong_buffer`",
        "train/opd_reverse_kl": "there is a teacher: `loss.distillation`",
        "train/pg_dual_clipfrac": "`loss.dual_clip` is set",
        "train/sapo_gate": "SAPO is the loss: `loss.policy`",
        "train/vespo_weight": "VESPO is the loss: `loss.policy`",
        **dict.fromkeys(("train/m2", "train/m2_kept"), "M2PO is the loss: `loss.policy`"),
        **dict.fromkeys(("train/cov", "train/cov_fraction"), "Clip-Cov or KL-Cov is the loss: `loss.policy`"),
        **dict.fromkeys(("train/top_entropy_threshold", "train/top_entropy_fraction"), "`loss.top_entropy` is below 1"),
        "train/opsm_clipfrac": "`loss.opsm_delta` is set",
        "train/answer_probability": "there is a warm-up",
        **dict.fromkeys(("train/expert_load_max", "train/expert_load_min", "train/expert_load_entropy"), _EXPERTS),
        **dict.fromkeys(("train/balance_loss", "train/router_z_loss"), _EXPERTS),
        "train/routing_replayed": "`trainer.routing_replay` is set",
        "train/support_replayed": "`trainer.support_replay` is set",
        "train/likeliest_known": "`loss.dppo_divergence` is `topk_tv` or `topk_kl`",
        "train/mfu": "the policy learns, and the peak of the trainer's GPU is known: H100 and H200 (SXM) in bfloat16",
        "train/stale_masked_fraction": "`loss.correction.mask_staleness` is set",
        "train/grad_cosine": "`trainer.gradient_cosine` is set, and there was a step of this kind before",
        "train/ess_rollout": "`trainer.optimizer.ess_scaling` is set",
        "train/staleness_weight": "`loss.correction.staleness_decay` is below 1",
        **dict.fromkeys(("train/float32_sampler_abs_diff_max", "train/float32_trainer_abs_diff_max"), _FLOAT32),
        "train/mis_tis_truncate_fraction": '`loss.correction.kind = "truncate"`',
        **dict.fromkeys(("train/mis_tis_clip_fraction_low", "train/mis_tis_clip_fraction_high"), '`loss.correction.kind = "clip"`'),
        **dict.fromkeys(("train/mis_tis_mask_fraction_low", "train/mis_tis_mask_fraction_high"), '`loss.correction.kind = "mask"`'),
        **dict.fromkeys(("train/mis_rs_mask_fraction_low", "train/mis_rs_mask_fraction_high"), _REJECTS),
        **dict.fromkeys(("train/mis_rs_catastrophic_token_fraction", "train/mis_rs_catastrophic_seq_fraction"), _VETO),
        **dict.fromkeys(("eval/heldout", "tokens/evaluated_total"), _HELD_OUT),
        **dict.fromkeys(("lengths/cut_p50", "lengths/cut_p95"), "one was"),
        **dict.fromkeys(("lengths/dropped_p50", "lengths/dropped_p95"), "one was"),
        "lengths/distance": "64 answers were trained since the start of `up`",
        "producer/slot_wait_room_s": "the stream was full",
        **dict.fromkeys(("engine/restarts_total", "rollout/prefix_cache_hit_rate", "engine/kv_cache_used"), _SGLANG),
        **dict.fromkeys(("engine/prompt_tokens_total", "engine/cached_tokens_total", "engine/retractions_total"), _SGLANG),
        **dict.fromkeys(("engine/server_running_requests", "engine/server_waiting_requests"), _SGLANG),
        "engine/inexact_completions_total": _SGLANG,
        **dict.fromkeys(("rollout/spec_accept_rate", "rollout/spec_accept_length", "engine/verify_passes_total"), _DRAFTS),
        **dict.fromkeys(("engine/drafted_tokens_total", "engine/accepted_drafts_total"), _DRAFTS),
    }
)

CONSTANTS: Mapping[str, str] = MappingProxyType(
    {
        "producer/failures_total": "0 while no task is given back to the queue, or unreadable",
        **dict.fromkeys(("producer/share/wait_room", "bus/full_total"), "0 while there is room on the sample stream"),
        "producer/slots": "`producer.concurrency`, as it was set",
        **dict.fromkeys(("trainer/gpus", "engine/gpus"), "a process keeps the GPUs that it began with"),
        "train/unlearned_total": "0 while every batch gives the policy a gradient",
        "train/nonfinite_tokens": "0 while log-probabilities are finite",
    }
)
