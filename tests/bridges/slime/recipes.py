"""Arguments of slime's own example scripts, as names and values, and scripts of bash that hand them over.

The names and values are those of THUDM/slime's `scripts/` and `examples/`; how a script is laid out here is ours.
"""

import json
from functools import reduce
from operator import or_
from typing import NamedTuple

Arguments = dict[str, str]
"""A flag and its values, separated by blanks; empty: a switch."""


def flags(text: str) -> Arguments:
    """Arguments as a command line has them."""
    pairs = (one.strip().partition(" ") for one in " ".join(text.split()).split("--")[1:])
    return {name: values for name, _, values in pairs}


FORM = flags(
    """--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
    --rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm"""
)
ROLLOUT = flags(
    """--prompt-data /root/dapo-math-17k/dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192
    --rollout-temperature 0.8 --global-batch-size 256 --balance-data"""
)
EVAL = flags(
    """--eval-interval 20 --eval-prompt-data aime /root/aime-2024/aime-2024.jsonl --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384 --eval-top-p 0.7"""
)
GRPO = flags(
    """--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 --eps-clip 0.2
    --eps-clip-high 0.28"""
)
ADAM = flags("--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98")
OFFLOADED = flags("--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer")
PERF = flags(
    """--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform
    --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216"""
)
MISC = flags(
    """--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --attention-backend flash"""
)
SGLANG = flags("--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7")
ONE_NODE = flags("--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate")


def saved(name: str) -> Arguments:
    """Checkpoints of a model."""
    root = f"/root/{name}"
    return flags(f"--hf-checkpoint {root} --ref-load {root}_torch_dist --load {root}_slime/ --save {root}_slime/ --save-interval 20")


QWEN3_4B: Arguments = {**FORM, **saved("Qwen3-4B"), **ROLLOUT, **EVAL, **PERF, **GRPO, **ADAM, **SGLANG, **MISC, **ONE_NODE}
MIXTURE = flags("--tensor-model-parallel-size 4 --expert-model-parallel-size 8 --max-tokens-per-gpu 20480")
ROUTER_BIAS = flags("--moe-router-score-function sigmoid --moe-router-enable-expert-bias")
LATENT = flags("--multi-latent-attention --kv-lora-rank 512 --qk-pos-emb-head-dim 64 --v-head-dim 128")
UNREACHED = ("--moe-router-enable-expert-bias", "--multi-latent-attention")
FILTERED = flags(
    """--rollout-batch-size 128 --over-sampling-batch-size 256
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std --num-steps-per-rollout 4"""
)
SFT = flags(
    """--rollout-function-path slime.rollout.sft_rollout.generate_rollout --prompt-data /root/openhermes2_5.parquet --input-key messages
    --rollout-shuffle --num-epoch 3 --rollout-batch-size 128 --global-batch-size 128 --loss-type sft_loss --calculate-per-token-loss
    --disable-compute-advantages-and-returns --debug-train-only"""
)


def without(arguments: Arguments, *names: str) -> Arguments:
    """All but these."""
    return {name: value for name, value in arguments.items() if name not in names}


class Recipe(NamedTuple):
    """A script's arguments, and what has to come of them."""

    parts: tuple[Arguments, ...]
    more: str
    """Arguments that are its own, which win over those of the parts, as a later part wins over an earlier one."""
    batch: tuple[int, int, int, int]
    """Tasks, rollouts, optimizer steps of a batch; batches."""
    refused: tuple[str, ...] = ()
    """Flags, by their first refusals; the rest is written with --leave-out all."""
    entry: str = "train.py"
    keys: str = ""
    """Some keys of the configuration, with values as JSON has them, or words."""

    @property
    def arguments(self) -> Arguments:
        return reduce(or_, (*self.parts, flags(self.more)))

    @property
    def expected(self) -> dict[str, object]:
        """The keys by name."""
        with_values = (one.partition("=") for one in self.keys.split())
        return {key: json.loads(text) if text[0] in '["0123456789' or text == "true" else text for key, _, text in with_values}


RECIPES: dict[str, Recipe] = {
    "qwen3-4b": Recipe(
        (QWEN3_4B,),
        "",
        (32, 8, 1, 3000),
        keys="trainer.backend=megatron trainer.tensor=2 engine.workers=4 weights.transport=ipc",
    ),
    "qwen3-0.6b-single-gpu": Recipe(
        (without(QWEN3_4B, "recompute-granularity", "recompute-method", "recompute-num-layers", "sequence-parallel", "balance-data"),),
        """--rm-type math --num-rollout 10 --rollout-batch-size 2 --n-samples-per-prompt 4 --global-batch-size 8
        --rollout-max-response-len 512 --rollout-top-p 0.95 --eval-interval 10 --skip-eval-before-train --n-samples-per-eval-prompt 1
        --eval-max-response-len 512 --eval-top-k 1 --calculate-per-token-loss --tensor-model-parallel-size 1 --max-tokens-per-gpu 4096
        --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.45 --sglang-cuda-graph-max-bs 8 --actor-num-gpus-per-node 1""",
        (2, 4, 1, 10),
        keys="""trainer.backend=torch engine.sglang.gpus=[0] loss.reduction=token_mean sampling.top_p=0.95 sampling.top_k=4096
        trainer.support_replay=true""",
    ),
    "glm4-9b": Recipe(
        (without(QWEN3_4B, "colocate"), saved("GLM-Z1-9B-0414")),
        """--context-parallel-size 2 --max-tokens-per-gpu 4608 --actor-num-gpus-per-node 4 --rollout-num-gpus 4
        --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.8 --sglang-attention-backend fa3
        --sglang-enable-deterministic-inference --use-wandb --wandb-project slime-dev --wandb-group glm""",
        (32, 8, 1, 3000),
        keys="""engine.sglang.gpus=[4,5,6,7] trainer.micro_tokens=9216 engine.deterministic=true
        engine.sglang.flags.mem_fraction_static=0.8 metrics.sinks=["wandb"]""",
    ),
    "qwen3-4b-fully-async": Recipe(
        (without(QWEN3_4B, "colocate", "sglang-mem-fraction-static", *EVAL),),
        """--rollout-function-path fully_async_rollout.generate_rollout_fully_async --rm-type dapo --reward-key score --use-tis
        --rollout-num-gpus-per-engine 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4""",
        (32, 8, 1, 3000),
        entry="train_async.py",
        keys="tasks.max_staleness=2 loss.correction.kind=truncate loss.correction.high=2.0 reward.key=score",
    ),
    "qwen3-30b-a3b": Recipe(
        (QWEN3_4B, OFFLOADED, MIXTURE),
        """--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 32 --use-tis --rollout-num-gpus-per-engine 8
        --sglang-cuda-graph-bs 1 2 4 8 16 24 32 --num-experts 128 --moe-layer-freq [1]*48""",
        (8, 4, 1, 3000),
        keys="trainer.experts=8 engine.sglang.flags.cuda_graph_bs=[1,2,4,8,16,24,32] loss.correction.kind=truncate",
    ),
    "moonlight-16b-a3b": Recipe(
        (without(QWEN3_4B, "global-batch-size", "attention-backend"), OFFLOADED, MIXTURE, ROUTER_BIAS, LATENT, FILTERED),
        """--rm-type math --rollout-max-response-len 4096 --eval-max-response-len 4096 --max-tokens-per-gpu 8192
        --rollout-num-gpus-per-engine 8 --moe-enable-deepep --moe-token-dispatcher-type flex""",
        (128, 8, 4, 3000),
        refused=UNREACHED,
        keys="tasks.drop_zero_variance=true producer.concurrency=256 trainer.minibatches=4",
    ),
    "deepseek-r1": Recipe(
        (without(QWEN3_4B, "global-batch-size"), OFFLOADED, ROUTER_BIAS, LATENT, FILTERED),
        """--rollout-max-response-len 32768 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --context-parallel-size 4
        --expert-model-parallel-size 32 --decoder-last-pipeline-num-layers 13 --max-tokens-per-gpu 16384
        --rollout-num-gpus-per-engine 64 --sglang-enable-ep-moe --sglang-dp-size 8 --sglang-enable-dp-attention
        --sglang-moe-dense-tp-size 1 --sglang-disable-radix-cache --sglang-deepep-mode auto --sglang-server-concurrency 1024
        --actor-num-nodes 16""",
        (128, 8, 4, 3000),
        refused=("--rollout-num-gpus-per-engine", "--decoder-last-pipeline-num-layers", *UNREACHED),
        keys="ray.address=auto trainer.ranks=128 trainer.experts=32",
    ),
    "qwen3-235b-a22b": Recipe(
        (without(QWEN3_4B, "colocate", "eval-interval", "use-kl-loss", "eps-clip-high"), OFFLOADED),
        """--rollout-batch-size 8 --global-batch-size 64 --advantage-estimator gspo --eps-clip 4e-4 --tensor-model-parallel-size 4
        --pipeline-model-parallel-size 4 --context-parallel-size 2 --expert-model-parallel-size 16
        --decoder-last-pipeline-num-layers 22 --max-tokens-per-gpu 16384 --rollout-num-gpus-per-engine 32 --sglang-enable-dp-attention
        --sglang-dp-size 4 --sglang-ep-size 32 --actor-num-nodes 8 --rollout-num-gpus 64
        --update-weight-buffer-size $(( 1024 * 1024 * 1024 * 4 ))""",
        (8, 8, 1, 3000),
        refused=("--rollout-num-gpus-per-engine", "--decoder-last-pipeline-num-layers"),
        keys="loss.policy=gspo loss.clip_low=0.0004 loss.clip_high=0.0004",
    ),
    "glm4.7-30b-a3b": Recipe(
        (QWEN3_4B, OFFLOADED, ROUTER_BIAS, LATENT),
        """--rollout-batch-size 128 --global-batch-size 1024 --rollout-max-response-len 32768 --kl-coef 0.00
        --pipeline-model-parallel-size 2 --context-parallel-size 2 --expert-model-parallel-size 4 --decoder-last-pipeline-num-layers 23
        --mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2 --rollout-num-gpus-per-engine 8
        --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-max-running-requests 512 --eval-temperature 1.0""",
        (128, 8, 1, 3000),
        refused=("--decoder-last-pipeline-num-layers", "--enable-mtp-training", "--mtp-loss-scaling-factor", *UNREACHED),
        keys="engine.slots=512 engine.sglang.flags.speculative_algorithm=EAGLE",
    ),
    "qwen3-30b-a3b-fsdp": Recipe(
        (without(QWEN3_4B, *PERF, *MISC, *FORM, "use-kl-loss", "load", "save", "save-interval", "ref-load"),),
        """--use-dynamic-batch-size --max-tokens-per-gpu 20480 --train-backend fsdp --gradient-checkpointing
        --attn-implementation flash_attention_3 --update-weight-buffer-size 536870912 --rollout-num-gpus-per-engine 8""",
        (32, 8, 1, 3000),
        keys="trainer.backend=torch trainer.shards=8 trainer.activations=0",
    ),
    "qwen3-4b-base-sft": Recipe(
        (FORM, saved("Qwen3-4B-Base"), without(PERF, "tensor-model-parallel-size"), MISC, SFT, ADAM),
        """--lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1 --adam-beta2 0.95 --actor-num-nodes 1
        --actor-num-gpus-per-node 8""",
        (128, 1, 1, 3 * 1_001_551 // 128),
        entry="train_async.py",
        keys="run.kind=sft data.messages_key=messages trainer.optimizer.warmup_steps=2348 loss.reduction=token_mean",
    ),
    "search-r1-qwen2.5-3b": Recipe(
        (without(QWEN3_4B, "rm-type", *EVAL),),
        """--prompt-data /root/nq_search/train.parquet --label-key reward_model --rollout-batch-size 64 --rollout-max-response-len 500
        --rollout-temperature 1.0 --global-batch-size 512 --kl-loss-coef 0.001 --actor-num-gpus-per-node 4 --rollout-num-gpus 4
        --custom-rm-path generate_with_search.reward_func --custom-generate-function-path generate_with_local_search.generate""",
        (64, 8, 1, 3000),
        keys="loss.kl.loss_coef=0.001 loss.kl.estimator=low_var_kl engine.sglang.gpus=[0,1,2,3]",
    ),
    "qwen2.5-0.5b-gsm8k": Recipe(
        (without(QWEN3_4B, "load", "save", "save-interval", "balance-data"),),
        """--rollout-batch-size 4 --n-samples-per-prompt 1 --num-rollout 40 --rollout-max-response-len 2048 --global-batch-size 4
        --tensor-model-parallel-size 1 --max-tokens-per-gpu 8092 --kl-coef 0.00 --actor-num-gpus-per-node 2 --rollout-num-gpus 2
        --use-slime-router --deterministic-mode --train-backend megatron --rm-type math --n-samples-per-eval-prompt 1 --eval-top-k 1""",
        (4, 1, 1, 40),
        refused=("--n-samples-per-prompt",),
    ),
    "qwen3-8b-opd": Recipe(
        (without(QWEN3_4B, "rm-type", "label-key", *EVAL, "eps-clip", "eps-clip-high", "colocate"),),
        """--custom-rm-path on_policy_distillation.reward_func --rm-url http://127.0.0.1:13141/generate
        --custom-reward-post-process-path on_policy_distillation.post_process_rewards --num-rollout 300 --rollout-batch-size 16
        --n-samples-per-prompt 4 --global-batch-size 64 --rollout-max-response-len 16384 --advantage-estimator on_policy_distillation
        --actor-num-gpus-per-node 2 --rollout-num-gpus 4""",
        (16, 4, 1, 300),
        refused=("--rm-url", "--advantage-estimator"),
    ),
}


def script(arguments: Arguments, entry: str = "train.py") -> str:
    """A script that has the arguments in arrays, as such scripts do, and starts the training through Ray."""
    names = list(arguments)
    parts = {"FIRST_ARGS": names[0::3], "OTHER_ARGS": names[1::3], "LAST_ARGS": names[2::3]}
    lines = ["#!/bin/bash", "set -ex", "LINKS=$(nvidia-smi topo -m | wc -l)", 'if [ "$LINKS" -gt 0 ]; then HAS=1; else HAS=0; fi']
    for array, given in parts.items():
        lines.append(f"{array}=(")
        lines += [f"   --{name} {value(arguments[name])}".rstrip() for name in given]
        lines.append("   # --lr 1.0\n)")
    lines.append(
        f"ray job submit --address=http://127.0.0.1:8265 --runtime-env-json=\"{{'HAS': '${{HAS}}'}}\" \\\n   -- python3 {entry} \\"
    )
    return "\n".join([*lines, *(f"   ${{{array}[@]}} \\" for array in parts), "   ${UNSET_ARGS[@]}"]) + "\n"


def value(text: str) -> str:
    """As a script writes it: arithmetic bare, what a glob could be in quotes."""
    return text if text.startswith("$((") or not any(one in text for one in "*[{'") else f'"{text}"'
