#!/usr/bin/env bash
# start.sh: how long examples/smollm2/gpu.toml takes from `up` to its first rollout on this host's first GPU: without compiled kernels and with
# those of the start before, twice each, in the order cold, warm, cold, warm; what does not fit into LIMIT seconds (default 300) is left out.
#
#   scripts/gpu/start.sh
#   ARGS="--set engine.sglang.quick_start=false" scripts/gpu/start.sh       # as SGLang starts by itself
#   DEVICE=cpu SGLANG_PYTHON=.venv-sglang/bin/python scripts/gpu/start.sh   # whether it works at all, without a GPU
#
# FOLDER (default examples/smollm2) holds the model and the rows (prepare.py). SGLANG_PYTHON: SGLang's interpreter (default python3).
# ARGS ("--set a.b=c ...") is handed to every run. STARTS (default "cold warm cold warm"): which.
# OUT (default ./out) gets start.json, a line for each start, start.txt, the time lines, and logs.tar.gz.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
unset TRITON_CACHE_DIR # kernels go where `run.kernels` says
folder=$(realpath "${FOLDER:-$code/examples/smollm2}")
python=$(realpath -s "$(command -v "${SGLANG_PYTHON:-python3}")")
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
export LIMIT=${LIMIT:-300}
work=${WORK:-/tmp/start}
rm -rf "$work" "$out/start.json" && mkdir -p "$work" && cd "$work" || exit 1
cp "$code"/examples/smollm2/*.toml "$work/"
changes=(--set "model.path=$folder/SmolLM2-135M-Instruct" --set "data.train=$folder/sums.jsonl" --set "data.heldout=$folder/sums-heldout.jsonl"
    --set "engine.sglang.python=$python" --set "run.dir=$work/runs" --set run.steps=1 --set evaluation.num_problems=16)
if [ "${DEVICE:-}" = cpu ]; then
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
    for flag in device=cpu attention_backend=torch_native cuda_graph_backend_decode=disabled cuda_graph_backend_prefill=disabled \
        mem_fraction_static=0.2 max_total_tokens=16384; do changes+=(--set "engine.sglang.flags.$flag"); done
    changes+=(--set "engine.sglang.gpus=[]" --set model.dtype=float32 --set tasks.batch_tasks=2 --set tasks.num_rollouts=2
        --set engine.slots=16 --set evaluation.num_problems=2 --set weights.transport=shm)
fi
# shellcheck disable=SC2206
changes+=(${ARGS:-})
number=0 kernels=
for start in ${STARTS:-cold warm cold warm}; do
    number=$((number + 1))
    if [ "$start" = cold ] || [ -z "$kernels" ]; then kernels=$work/kernels-$number; fi
    name=$start-$number
    began=$(date +%s.%N)
    within 200 python3 -m streamrl up gpu.toml --plain --name "$name" "${changes[@]}" --set "run.kernels=$kernels" > "$name.log" 2>&1 || {
        tail -n 5 "$name.log" | cut -c1-300; [ -d "runs/$name" ] || break; }
    python3 "$code/scripts/gpu/start.py" "$work/runs/$name" "$began" "$name" "$out"
done | tee "$out/start.txt"
find . -name '*.log' -not -path '*/credentials/*' | tar czf "$out/logs.tar.gz" -T -
