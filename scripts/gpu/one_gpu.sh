#!/usr/bin/env bash
# one_gpu.sh: docs/gpu.md from beginning to end on this host's first GPU, with a random model of Qwen3-0.6B's shape; at most LIMIT
# seconds (default 480). The page's configuration with four changes: the model, SGLang's interpreter, the reward (the page's own one,
# by which random texts differ), and RL_SECONDS of training (default 100; the replay takes as long as the training steps did).
#
#   scripts/gpu/one_gpu.sh
#   CARD_GIB=24 ARGS="--set ..." scripts/gpu/one_gpu.sh      # only so much of the GPU's memory free, as on a smaller one
#   DEVICE=cpu SGLANG_PYTHON=.venv-sglang/bin/python scripts/gpu/one_gpu.sh      # whether it works at all: a tiny model, no GPU
#
# MODEL: a Hugging Face folder in the place of the random model; SHAPE: another random one (benchmarks/shapes.py).
# SGLANG_PYTHON: SGLang's interpreter (default python3). ARGS ("--set a.b=c ...") is handed to the run.
# OUT (default ./out) gets summary.json, page.txt (the line for the page), report.md, report.png, verify.json, logs.tar.gz and the
# compiled kernels (triton.tar.gz).
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python=$(command -v "${SGLANG_PYTHON:-python3}") || { echo "one_gpu.sh: expected SGLang's interpreter in SGLANG_PYTHON, got ${SGLANG_PYTHON:-python3}" >&2; exit 2; }
python=$(realpath -s "$python") # a link is what makes it that of its environment
model=${MODEL:+$(realpath "$MODEL")}
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
work=${WORK:-/tmp/one_gpu}
rm -rf "$work" && mkdir -p "$work" && cd "$work" || exit 1
one=$code/scripts/gpu/one_gpu.py
shape=0.6B seconds=${RL_SECONDS:-100}
changes=()
if [ "${DEVICE:-}" = cpu ]; then
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
    shape=tiny seconds=${RL_SECONDS:-40}
    flags=(device=cpu attention_backend=torch_native cuda_graph_backend_decode=disabled cuda_graph_backend_prefill=disabled
        mem_fraction_static=0.2 max_total_tokens=16384)
    for flag in "${flags[@]}"; do changes+=(--set "engine.sglang.flags.$flag"); done
    changes+=(--set "engine.sglang.gpus=[]" --set model.dtype=float32 --set sampling.max_new_tokens=16 --set tasks.batch_tasks=4
        --set engine.slots=16 --set evaluation.num_problems=8 --set evaluation.sampling.max_new_tokens=16)
fi
lines() { nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader 2> /dev/null || echo "no GPU"; }
lines

beside=()
stop() { for pid in "${beside[@]}"; do kill "$pid" 2> /dev/null && wait "$pid" 2> /dev/null; done; beside=(); }
trap stop EXIT

[ -n "$model" ] || { model=$work/model && within 120 python3 "$one" model "${SHAPE:-$shape}" "$model" || exit 1; }
if [ -n "${CARD_GIB:-}" ]; then
    python3 "$one" ballast "$CARD_GIB" > ballast.log 2>&1 &
    beside+=($!)
    for _ in $(seq 60); do grep -q free ballast.log && break; sleep 1; done
    cat ballast.log
fi
python3 "$one" memory "$out/memory.json" &
beside+=($!)

python3 -m streamrl init mine --example gsm8k > /dev/null || exit 1
changes+=(--set "model.path=$model" --set "engine.sglang.python=$python" --set reward.kind=mine/brief.py:score
    --set "run.max_seconds=$seconds" --set "run.dir=$work/runs")
# shellcheck disable=SC2206
changes+=(${ARGS:-})
within 60 python3 -m streamrl doctor mine/one_gpu.toml "${changes[@]}" > doctor.log 2>&1
cat doctor.log
within 330 python3 -m streamrl up mine/one_gpu.toml --plain "${changes[@]}" > up.log 2>&1
awk 'NR % 5 == 1' up.log | cut -c1-200 | tail -n 20
tail -n 25 up.log | grep -v "^\[" | cut -c1-200
stop # the memory's peaks are those of the run
python3 -m streamrl status one-gpu --dir "$work/runs" > status.log 2>&1
cut -c1-200 status.log
for log in "$work"/runs/one-gpu/logs/*.log; do
    found=$(grep -E -A12 "ERROR|Traceback|WARNING" "$log" 2> /dev/null | grep -vE " INFO |event=waiting_for_engine" | tail -n 20 | cut -c1-240)
    [ -n "$found" ] && echo "== $log" && echo "$found"
done
python3 "$code/examples/gsm8k/report.py" one-gpu --dir "$work/runs" --out "$work/report" > /dev/null && {
    mv report/report.md report/report.png "$out/" && mv report/totals.json "$out/totals.json" && head -n 8 "$out/report.md" | cut -c1-250; }
within 240 python3 -m streamrl replay one-gpu --verify --json --dir "$work/runs" > "$out/verify.json" 2> replay.log
tail -n 5 replay.log | cut -c1-200
python3 "$one" result "$work/runs/one-gpu" "$out" "$python"
result=$?
rm -f "$out/totals.json" "$out/memory.json" # both are in summary.json
(cd "$work" && find . -name '*.log' -o -name summary.json -o -name config.json -path '*/runs/*' -o -name versions.csv) |
    grep -v -e /model/ -e /hf/ -e /credentials/ -e /checkpoints/ | tar czf "$out/logs.tar.gz" -C "$work" -T -
keep_kernels "$out/triton.tar.gz"
ls -l "$out"
echo "== $SECONDS s in all"
exit $result
