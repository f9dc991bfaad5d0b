#!/usr/bin/env bash
# routing.sh: how far trainer and engine are apart at equal weights in a mixture of experts, with routing replay and without. `streamrl up` in
# lockstep with a learning rate of 0, SGLang and the trainer in bfloat16 on this host's first GPU, a random mixture of 12 layers with 64 experts.
#
#   scripts/gpu/routing.sh               # 400 s on an H200, most of it the first start of SGLang
#   DEVICE=cpu scripts/gpu/routing.sh    # whether it works at all: the local engine, a tiny mixture, no GPU
#
# LIMIT (default 230): seconds after which one run is ended. OUT (default ./out) gets routing.txt and the logs.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=$(realpath -m "${OUT:-out}")
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
options=(--set run.steps=8 --set model.path=mixture --set data.chat_template=false --set data.max_prompt_tokens=4 --set warmup.max_steps=0
    --set tasks.max_staleness=0 --set tasks.drop_zero_variance=false --set tasks.num_rollouts=8 --set trainer.optimizer.learning_rate=0.0
    --set "data.train=train.jsonl" --set "reward.kind=reward.py:letters")
if [ "${DEVICE:-}" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=""
    options+=(--set model.max_len=24 --set sampling.max_new_tokens=16 --set tasks.batch_tasks=4)
else
    nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader | tee "$out/routing.txt"
    options+=(--set model.max_len=160 --set sampling.max_new_tokens=128 --set tasks.batch_tasks=16 --set engine.kind=sglang --set engine.slots=128
        --set model.dtype=bfloat16 --set trainer.device=cuda --set producer.concurrency=32)
    for flag in 'attention_backend="triton"' 'sampling_backend="pytorch"' 'grammar_backend="none"' mem_fraction_static=0.4 \
        disable_prefill_cuda_graph=true "cuda_graph_bs_decode=[1, 16, 64, 128]" cuda_graph_max_bs_decode=128; do
        options+=(--set "engine.sglang.flags.$flag")
    done
fi
python3 - << 'PYTHON' || exit
import json
import os
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamrl.data.characters import VOCAB_SIZE, write_tokenizer

cpu = os.environ.get("DEVICE") == "cpu"
size = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
if not cpu:
    size = dict(hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=512)
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=VOCAB_SIZE, num_key_value_heads=4, head_dim=64, max_position_embeddings=256, norm_topk_prob=True, initializer_range=0.05, **size
)
Qwen3MoeForCausalLM(config).to(torch.float32 if cpu else torch.bfloat16).save_pretrained("mixture")
write_tokenizer(Path("mixture"))
Path("train.jsonl").write_text("".join(json.dumps({"prompt": f"{n:02}", "label": "3"}) + "\n" for n in range(100)))
Path("reward.py").write_text("def letters(task, episode):\n    return float(sum(map(ord, episode.completion)) % 7)\n")
Path("run.toml").write_text("")
PYTHON
result=0
for replay in true false; do
    timeout --foreground --signal=INT --kill-after=20 "${LIMIT:-230}" python3 -m streamrl up run.toml --plain --set "run.name=replay-$replay" \
        --set "trainer.routing_replay=$replay" "${options[@]}" > "$out/$replay.log" 2>&1 || { result=1; tail -n 20 "$out/$replay.log" | cut -c1-240; }
    python3 - "replay-$replay" << 'PYTHON' || result=1
import asyncio
import sys
from pathlib import Path

import numpy as np

from streamrl.history.source import read_entries

KEYS = ("train/mis_k3_kl", "train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max", "train/routing_replayed")
_, entries = asyncio.run(read_entries(sys.argv[1], base=Path("runs")))
for key in KEYS:
    values = [entry.metrics[key] for entry in entries if key in entry.metrics]
    if values:
        print(f"{sys.argv[1]}, {len(values)} batches: {key} {np.mean(values):.3g} ({min(values):.3g} - {max(values):.3g})")
PYTHON
    tar czf "$out/$replay.tar.gz" "runs/replay-$replay/logs"
done > >(tee -a "$out/routing.txt") 2>&1
echo "== $SECONDS s in all"
exit $result
