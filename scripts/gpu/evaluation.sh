#!/usr/bin/env bash
# evaluation.sh: on this host's first GPU, `streamrl bench eval` with SGLang and a random model of Qwen3-0.6B's shape, then `streamrl eval`
# of that model's directory, twice: the second finds all answers there. About eight minutes; LIMIT (seconds, default 480) ends it.
#
# SGLANG_PYTHON: SGLang's interpreter (default python3). ARGS is handed to the benchmark (default one round of 1,000 problems x 16 samples of 64 tokens).
# OUT (default ./out) gets the benchmark's files, the table of the evaluation and the server's log.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python=$(realpath -s "$(command -v "${SGLANG_PYTHON:-python3}")")
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
work=${WORK:-/tmp/evaluation}
rm -rf "$work" && mkdir -p "$work" && cd "$work" || exit 1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
within 120 python3 "$code/scripts/gpu/one_gpu.py" model 0.6B model || exit 1
engine=("engine.sglang.python=$python" "engine.sglang.gpus=[0]")
flags=(mem_fraction_static=0.35 attention_backend=triton sampling_backend=pytorch grammar_backend=none disable_prefill_cuda_graph=true
    cuda_graph_max_bs_decode=256 "cuda_graph_bs_decode=[1,16,64,128,192,256]")
for flag in "${flags[@]}"; do engine+=("engine.sglang.flags.$flag"); done
changes=()
for change in "${engine[@]}"; do changes+=(--set "$change"); done
# shellcheck disable=SC2086
within 480 python3 -m benchmarks eval --engine sglang --model model --out "$out/bench-eval" "${changes[@]}" \
    ${ARGS:---problems 1000 --tokens 64 --rounds 1} || result=1
python3 - <<'PY'
import json
rows = ({"prompt": f"{n % 89}+{n % 97}=", "label": str(n % 89 + n % 97)} for n in range(200))
open("rows.jsonl", "w").write("".join(json.dumps(row) + "\n" for row in rows))
PY
changes=(--with 'engine.kind="sglang"' --with model.dtype=bfloat16 --with evaluation.n=4 --with evaluation.num_problems=200
    --with evaluation.sampling.max_new_tokens=32
    --with evaluation.sampling.temperature=1.0)
for change in "${engine[@]}"; do changes+=(--with "$change"); done
for _ in 1 2; do
    within 240 python3 -m streamrl eval model --set sums=rows.jsonl --out answers "${changes[@]}" > eval.log 2>&1 || result=1
    tail -n 12 eval.log | cut -c1-200
done
cp eval.log answers/*.log "$out/" 2> /dev/null
keep_kernels "$out/triton.tar.gz"
exit "${result:-0}"
