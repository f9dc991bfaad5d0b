#!/usr/bin/env bash
# rollouts.sh: on this host's first GPU, `streamrl bench rollouts` with examples/smollm2/gpu.toml, answers of 10 and of 300 tokens: a sweep over
# SGLang's flags, then the whole stack with the best of them beside a plain client of the same server. At most LIMIT seconds (default 530).
#
#   scripts/gpu/rollouts.sh                                                # random weights of SmolLM2-135M's shape
#   SHAPE=0.6B TOKENS=300 ROLLOUTS=1024 scripts/gpu/rollouts.sh            # a larger model
#   ARGS="--sets defaults" SWEEP_S=0 scripts/gpu/rollouts.sh               # no sweep: the flags of the file
#   DEVICE=cpu SGLANG_PYTHON=.venv-sglang/bin/python scripts/gpu/rollouts.sh      # whether it works at all: a tiny model, no GPU
#
# MODEL: a Hugging Face folder in the place of the random model. SGLANG_PYTHON: SGLang's interpreter (default python3). ARGS is handed to the
# benchmark. SWEEP_S (default 300): seconds in which sets of flags are begun. Nothing has to be carried but what environment.sh needs.
# OUT (default ./out) gets bench-rollouts (raw.jsonl, report.json, table.md, the servers' logs) and the compiled kernels (triton.tar.gz).
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export LIMIT=${LIMIT:-530}
python=$(realpath -s "$(command -v "${SGLANG_PYTHON:-python3}")")
model=${MODEL:+$(realpath "$MODEL")}
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
work=${WORK:-/tmp/rollouts}
rm -rf "$work" && mkdir -p "$work" && cd "$work" || exit 1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || echo "no GPU"
shape=${SHAPE:-135M} tokens=${TOKENS:-10,300} rollouts=${ROLLOUTS:-8192,1024} sweep=${SWEEP_S:-300} changes=()
if [ "${DEVICE:-}" = cpu ]; then
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
    shape=tiny tokens=${TOKENS:-4,8} rollouts=${ROLLOUTS:-128}
    flags=(device=cpu attention_backend=torch_native cuda_graph_backend_decode=disabled cuda_graph_backend_prefill=disabled
        mem_fraction_static=0.2 max_total_tokens=16384)
    for flag in "${flags[@]}"; do changes+=(--set "engine.sglang.flags.$flag"); done
    changes+=(--set "engine.sglang.gpus=[]" --set model.dtype=float32 --set engine.slots=16 --set tasks.num_rollouts=8)
fi
[ -n "$model" ] || { model=$work/model && within 120 python3 "$code/scripts/gpu/one_gpu.py" model "$shape" "$model" || exit 1; }
python3 - << 'PY'
import json
rows = ({"prompt": f"What is {n % 89} + {n % 97}?", "label": str(n % 89 + n % 97)} for n in range(4000))
open("rows.jsonl", "w").write("".join(json.dumps(row) + "\n" for row in rows))
PY
cp "$code/examples/smollm2/gpu.toml" . # paths in it are looked for beside it
[ "$sweep" = 0 ] || changes+=(--sweep --sweep-s "$sweep")
# shellcheck disable=SC2086
within 520 python3 -m benchmarks rollouts gpu.toml --set "model.path=$model" --set "data.train=$work/rows.jsonl" --set "data.heldout=$work/rows.jsonl" \
    --set "engine.sglang.python=$python" --tokens "$tokens" --rollouts "$rollouts" --plain --out "$out/bench-rollouts" "${changes[@]}" \
    ${ARGS:-} > bench.log 2>&1
result=$?
grep -E "event=(flags|sglang_started)|rror" bench.log | cut -c1-200
# Also of what was measured until it was ended.
python3 -m benchmarks rollouts --report "$out/bench-rollouts" || tail -n 30 bench.log | cut -c1-300
cp bench.log "$out/"
keep_kernels "$out/triton.tar.gz"
ls -l "$out" "$out/bench-rollouts"
echo "== $SECONDS s in all"
exit $result
