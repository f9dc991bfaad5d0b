#!/usr/bin/env bash
# results.sh RUN[+RUN...]...: the runs of docs/results.md; each argument has a GPU, and its runs go one after the other. At most LIMIT seconds
# (default 560) in all. A RUN is TASK:SEED or TASK:SEED:WAY.
#
#   sums instructions gcd chain_sum gsm8k                 examples/smollm2/gpu.toml with the rows of that task
#   calculator gateway                                    examples/smollm2/calculator.toml, whose rows are written here: the agent by `Chat`,
#                                                         and on OpenAI's SDK in GUESTS processes (with the Python of SGLang, which needs it)
#   gemma                                                 gpu.toml with Gemma 3 270M and GSM8K as texts: examples/smollm2/gemma.py, which
#                                                         is run first where FOLDER has no gemma-3-270m (with the wheels in WHEELS)
#   trl                                                   benchmarks/peers: TRL on the rows of `sums`
#   WAY                                                   arguments more, of the variable WAY_..., as WAY_all="--set tasks.drop_zero_variance=false"
#
# FOLDER (default examples/smollm2) holds the model and the rows of the others. STEPS, ARGS ("--set a.b=c ...") are handed to every run.
# OUT (default ./out) gets TASK-SEED.csv, .json (summary), .txt (what `up` printed at its end) and logs.tar.gz.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
folder=$(realpath "${FOLDER:-$code/examples/smollm2}")
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
work=${WORK:-/tmp/results}
python=$(realpath -s "$(command -v "${SGLANG_PYTHON:-python3}")")
limit=${LIMIT:-560}
mkdir -p "$work"
cp "$code"/examples/smollm2/*.toml "$code"/examples/smollm2/*.py "$work/"
if [[ " $*" == *[\ +]gemma:* ]] && [ ! -e "$folder/gemma-3-270m" ]; then
    python3 "$work/gemma.py" "$code/examples/gsm8k" "$folder" ${WHEELS:+"$WHEELS"} || exit 1
fi
python3 "$work/calculator.py"
nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader

# What a task changes of its file.
changes() {
    local rows=(--set "data.train=$folder/$1.jsonl" --set "data.heldout=$folder/$1-heldout.jsonl")
    case $1 in
        sums) echo "${rows[@]}" ;;
        gcd | chain_sum) echo "${rows[@]}" --set evaluation.num_problems=256 --set run.steps=40 ;;
        calculator) ;;
        gateway) echo --set producer.workers=0 --set gateway.workers=1 ;;
        instructions)
            echo "${rows[@]}" --set reward.kind=instructions.py:score --set sampling.max_new_tokens=40 \
                --set evaluation.sampling.max_new_tokens=40 --set evaluation.num_problems=96 --set model.max_len=160 --set run.steps=40 ;;
        gsm8k)
            echo --set "data.train=$code/examples/gsm8k/train.parquet" --set "data.heldout=$code/examples/gsm8k/test.parquet" \
                --set model.max_len=640 --set data.max_prompt_tokens=320 --set sampling.max_new_tokens=320 \
                --set evaluation.sampling.max_new_tokens=320 --set evaluation.num_problems=1319 --set evaluation.every=40 \
                --set tasks.batch_tasks=16 ;;
        gemma)
            # The base model, which has no chat template. All test questions are asked before the first batch and behind the last.
            echo "${rows[@]}" --set "model.path=$folder/gemma-3-270m" --set data.chat_template=false --set model.max_len=768 \
                --set data.max_prompt_tokens=512 --set sampling.max_new_tokens=256 --set evaluation.sampling.max_new_tokens=256 \
                --set 'sampling.stop=["\n\n"]' --set 'evaluation.sampling.stop=["\n\n"]' --set evaluation.num_problems=1319 \
                --set evaluation.every=0 --set tasks.batch_tasks=16 --set run.steps=60 ;;
        *) echo "results.sh: expected a task, got $1" >&2; return 1 ;;
    esac
}

# The agent on OpenAI's SDK, in GUESTS processes (default 2), from when the gateway of a run listens until it is gone.
guest() {
    local port=$((8322 + $1)) key=$work/runs/$2/credentials/gateway-key end=$((SECONDS + $3)) guests=() i
    until [ -e "$key" ] && (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do
        if [ -e "$2.ended" ] || [ "$SECONDS" -ge "$end" ]; then return 1; fi
        sleep 1
    done
    for ((i = 0; i < ${GUESTS:-2}; i++)); do
        timeout "$((end - SECONDS))" "$python" calculator_openai.py "http://127.0.0.1:$port" "$key" --sessions "$((512 / ${GUESTS:-2}))" &
        guests+=($!)
    done
    wait "${guests[@]}"
}

one() {
    local gpu=$1 task=$2 seed=$3 variant=${4:-} name
    name=$task-$seed${variant:+-$variant}
    local left=$((limit - SECONDS)) way=WAY_$variant
    [ "$left" -gt 90 ] || { echo "== no time left for $name"; return; }
    export CUDA_VISIBLE_DEVICES=$gpu
    cd "$work" || return 1
    local began
    began=$(date +%s.%N)
    if [ "$task" = trl ]; then
        # shellcheck disable=SC2086
        timeout --signal=INT --kill-after=10 "$left" python3 -m benchmarks.peers.trl_grpo "$folder" "$out/$name.csv" --steps "${STEPS:-110}" --seed "$seed" \
            --seconds "$((left - 20))" ${!way:-} > "$name.log" 2>&1
        grep -E "held-out|memory|Error|gradient" "$name.log"
        return
    fi
    local set file=gpu.toml guest="" steps=110
    case $task in calculator | gateway) file=calculator.toml steps=60 ;; esac
    read -ra set <<< "$(changes "$task") ${ARGS:-} ${!way:-}"
    rm -f "$name.ended"
    if [ "$task" = gateway ]; then
        set+=(--set "gateway.port=$((8322 + gpu))")
        guest "$gpu" "$name" "$left" > "$name-guest.log" 2>&1 &
        guest=$!
    fi
    timeout --signal=INT --kill-after=25 "$((left - 25))" python3 -m streamrl up "$file" --plain --name "$name" --set run.dir="$work/runs" --set "run.seed=$seed" \
        --set "model.path=$folder/SmolLM2-135M-Instruct" --set "engine.sglang.python=$python" --set run.steps="${STEPS:-$steps}" "${set[@]}" > "$name.log" 2>&1
    echo "== $name: exit code $?"
    touch "$name.ended"
    if [ -n "$guest" ]; then
        wait "$guest"
        tail -n 3 "$name-guest.log"
    fi
    python3 curve.py "$name" --dir "$work/runs" --out "$work/curve-$name" --since "$began" && cp "$work/curve-$name/$name.csv" "$out/"
    cp "$work/runs/$name/summary.json" "$out/$name.json" 2> /dev/null
    { awk 'NR % 15 == 1' "$name.log" | cut -c1-230 | tail -n 14; tail -n 14 "$name.log" | cut -c1-230; } > "$out/$name.txt"
    grep ",0\.[0-9]*,,0" "$out/$name.csv"
}

gpu=0
for group in "$@"; do
    (
        for run in ${group//+/ }; do
            IFS=: read -r task seed variant <<< "$run"
            one "$gpu" "$task" "$seed" "${variant:-}"
        done
    ) &
    gpu=$((gpu + 1))
done
wait
(cd "$work" && find . -name '*.log' -o -name 'summary.json') | grep -v -e /credentials/ | tar czf "$out/logs.tar.gz" -C "$work" -T -
keep_kernels "$out/triton.tar.gz"
ls -l "$out"
