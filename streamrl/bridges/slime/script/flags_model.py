"""Flags of Megatron: the model's form, which streamrl reads from config.json, and how it is cut and computed."""

from __future__ import annotations

from streamrl.bridges.slime.script.flag import Flag, mapped, near, nothing, refused

_FORM = """
    spec num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention kv-channels qk-layernorm
    normalization norm-epsilon use-rotary-position-embeddings position-embedding-type no-rope-fusion rotary-base rotary-percent
    rotary-interleaved rotary-scaling-factor use-rope-scaling rope-scaling-factor rope-type rotary-seq-len-interpolation-factor
    vocab-size padded-vocab-size make-vocab-size-divisible-by disable-bias-linear add-bias-linear add-qkv-bias swiglu squared-relu
    openai-gelu seq-length decoder-seq-length max-position-embeddings untie-embeddings-and-output-weights no-position-embedding
    tokenizer-type tokenizer-model  init-method-std window-size softmax-type glu-linear-offset activation-func-clamp-value
    num-experts moe-layer-freq moe-ffn-hidden-size moe-router-topk moe-router-pre-softmax moe-router-score-function
    moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor moe-router-topk-limited-devices
    moe-shared-expert-intermediate-size moe-shared-expert-gate first-k-dense-replace post-self-attn-layernorm post-mlp-layernorm
    q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mscale mscale-all-dim beta-fast beta-slow
    attention-output-gate use-gated-attention linear-attention-freq linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim
    linear-num-key-heads linear-num-value-heads mtp-num-layers megatron-to-hf-mode
"""
_SPEED = """
    sequence-parallel overlap-grad-reduce overlap-param-gather tp-comm-overlap use-mcore-models transformer-impl
    no-gradient-accumulation-fusion
    no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion cross-entropy-loss-fusion
    cross-entropy-fusion-impl moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-token-dispatcher-type moe-enable-deepep
    moe-token-drop-policy moe-router-load-balancing-type moe-shared-expert-overlap moe-deepep-num-sms use-flash-attn manual-gc
    manual-gc-interval no-check-for-nan-in-loss-and-grad no-create-attention-mask-in-dataloader use-cpu-initialization
    log-probs-chunk-size recompute-loss-function attn-implementation no-rope-freq qwen-gdn-backend fsdp-cpu-backend
"""
_EXACT = """
    accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 grad-reduce-in-bf16 moe-router-dtype apply-query-key-layer-scaling
    no-query-key-layer-scaling
"""

_UNREACHED = "cannot run: SGLang has {} of such a model outside of what a version carries"
_ANOTHER = 'another model; if it is left out, set engine.sglang.swap = "pause", which has not been tried'


def _flags(names: str) -> tuple[str, ...]:
    return tuple(f"--{name}" for name in names.split())


MODEL: tuple[Flag, ...] = (
    *nothing("it is read from the model's config.json", *_flags(_FORM)),
    mapped("--bf16", "switch", "model.dtype", says="slime's default too"),
    mapped("--moe-aux-loss-coeff", "number", "loss.experts.balance_coef"),
    mapped("--moe-z-loss-coeff", "number", "loss.experts.z_coef"),
    mapped("--attention-dropout", "number", default=0.1, says="0; nothing is dropped here, and Megatron's default is 0.1"),
    mapped("--hidden-dropout", "number", default=0.1, says="0; nothing is dropped here, and Megatron's default is 0.1"),
    near("--moe-router-bias-update-rate", "number", says="expert biases of the router are not moved"),
    *refused("float16 is not trained", "--bf16", "--fp16"),
    *refused("numbers of 8 and 4 bits are not trained", "--bf16", "--fp8-format", "--fp8-recipe", "--fp8-param-gather", "--fp4-format"),
    *refused("low-rank adapters are not trained", "all parameters are", "--lora-rank", "--lora-alpha", "--lora-path"),
    *refused(_UNREACHED.format("e_score_correction_bias"), _ANOTHER, "--moe-router-enable-expert-bias"),
    *refused(_UNREACHED.format("w_kc and w_vc"), _ANOTHER, "--multi-latent-attention"),
    *refused(_UNREACHED.format("weight + 1 of each norm"), _ANOTHER, "--apply-layernorm-1p"),
    *refused("routers are trained", "leave it out", "--moe-router-freeze-gate", "--freeze-moe-router"),
    *refused("tokens are not dropped by capacity", "leave it out", "--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity"),
)
PARALLEL: tuple[Flag, ...] = (
    mapped("--tensor-model-parallel-size", "whole", "trainer.tensor", default=1, says="not of a mixture whose experts are divided"),
    mapped("--pipeline-model-parallel-size", "whole", "trainer.pipeline", default=1, says="not of a mixture whose experts are divided"),
    mapped("--context-parallel-size", "whole", "trainer.context", default=1, says="not of a mixture whose experts are divided"),
    mapped("--expert-model-parallel-size", "whole", "trainer.experts", default=1),
    mapped("--expert-tensor-parallel-size", "whole", says="1: an expert stays whole"),
    mapped(
        "--recompute-granularity",
        "text",
        "trainer.activations",
        says="full: no layer keeps its activations. selective: as many as memory allows",
    ),
    mapped("--gradient-checkpointing", "switch", "trainer.activations"),
    *nothing(
        "with full recomputation each layer is run again by itself", "--recompute-method", "--recompute-num-layers", "--recompute-modules"
    ),
    *nothing("trainer.attention chooses by what is installed; it is exact", "--attention-backend"),
    *refused("stages have equally many layers, one group each", "leave it out", "--decoder-first-pipeline-num-layers"),
    *refused("stages have equally many layers, one group each", "leave it out", "--decoder-last-pipeline-num-layers"),
    *refused("stages have equally many layers, one group each", "leave it out", "--num-layers-per-virtual-pipeline-stage"),
    *refused("stages have equally many layers, one group each", "leave it out", "--num-virtual-stages-per-pipeline-rank"),
    *refused("stages have equally many layers, one group each", "leave it out", "--pipeline-model-parallel-layout"),
    *nothing("ranks that share a row gather its keys", "--allgather-cp", "--cp-comm-type"),
    *nothing("it is about speed alone", *_flags(_SPEED)),
    *nothing("sums and softmax are float32", *_flags(_EXACT)),
)
