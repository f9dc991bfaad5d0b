#!/usr/bin/env bash
# gsm8k.sh [all|train|4b|tail]: examples/gsm8k on this host's first two GPUs; at most LIMIT seconds (default 530).
#
#   train   gsm8k.toml: warm-up by demonstrations, then reinforcement learning for RL_SECONDS (default 110)
#   tail    tail.toml twice, asynchronous and in lockstep, TAIL_BATCHES each (default 52, with `all` 20), lockstep with a slot for every
#           rollout of a batch; the trained policy if there is one. About 350 s, 200 of them of training
#   4b      as train, a model of 4.0 billion parameters and 128 questions: about 60 s to build it, 75 s of warm-up, RL_SECONDS (default 80),
#           80 s for the last checkpoint (56 GB). Memory is a faster disk: WORK=/dev/shm/gsm8k
#   all     train and tail, in this order (default)
#
# ARGS ("--set a.b=c ...") is handed to every run.
# OUT (default ./out) gets gsm8k.{md,png,csv} (gsm8k-4b of the large one), tail.md, tail-{async,lockstep}.png, logs.tar.gz (logs, summaries, all tables) and the compiled
# kernels (triton.tar.gz). A part that hangs is ended in time for the rest to be kept.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
what=${1:-all}
case $what in all | train | 4b | tail) ;; *) echo "gsm8k.sh: expected all, train, 4b or tail, got $what" >&2; exit 2 ;; esac
here=$code/examples/gsm8k
size=() seconds=110 name=gsm8k
if [ "$what" = 4b ]; then
    size=(--set model.hidden=2560 --set model.layers=44 --set model.heads=20 --set model.kv_heads=4 --set model.intermediate=9728
        --set data.train="$here/train.parquet@[0:128]" --set warmup.max_steps=220 --set warmup.learning_rate=2e-4
        --set trainer.optimizer.learning_rate=1e-5 --set evaluation.num_problems=64)
    seconds=80 name=gsm8k-4b
fi
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
work=${WORK:-/tmp/gsm8k}
runs=$work/runs
mkdir -p "$work"
cd "$work" || exit 1
nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader
nvidia-smi topo -m | head -3

# within SECONDS COMMAND...: the command's own end, or an orderly one (Ctrl-C drains a run), or none at all; never past LIMIT in all.
within() {
    local limit=$1 left=$((${LIMIT:-530} - SECONDS - 30))
    shift
    [ "$left" -ge 20 ] || { echo "== no time left for: $*"; return; }
    # In the foreground only the command itself is signalled, and asks its workers to drain.
    timeout --foreground --signal=INT --kill-after=25 $((left < limit ? left : limit)) "$@"
    local status=$?
    [ $status -eq 0 ] || echo "== exit code $status: $*"
}

show_logs() {
    for log in "$runs/$1"/logs/*.log; do
        found=$(grep -E -A12 "ERROR|Traceback|WARNING" "$log" 2>/dev/null | grep -vE " INFO |event=waiting_for_engine" | tail -n 25 | cut -c1-240)
        [ -n "$found" ] && echo "== $log" && echo "$found"
    done
}

if [ "$what" != tail ]; then
    within "${TRAIN_LIMIT:-$([ "$what" = 4b ] && echo 420 || echo 330)}" python3 -m streamrl up "$here/gsm8k.toml" --plain --set run.dir="$runs" \
        --set run.max_seconds="${RL_SECONDS:-$seconds}" "${size[@]}" ${ARGS:-} > train.log 2>&1
    awk 'NR % 4 == 1' train.log | cut -c1-200 | tail -n 28
    tail -n 45 train.log | grep -v "^\[" | cut -c1-200
    show_logs gsm8k
    python3 "$here/report.py" gsm8k --dir "$runs" --out "$work/report" && {
        cp report/report.md "$out/$name.md"; cp report/report.png "$out/$name.png"; cp report/versions.csv "$out/$name.csv"; }
fi
if [ "$what" = all ] || [ "$what" = tail ]; then
    policy=$(find "$runs/gsm8k/hf" -mindepth 1 -maxdepth 1 -type d 2>/dev/null | sort | tail -n 1)
    batches=${TAIL_BATCHES:-$([ "$what" = all ] && echo 20 || echo 52)}
    within "${TAIL_LIMIT:-480}" python3 "$here/async_vs_lockstep.py" "$here/tail.toml" --dir "$runs" --out "$out/tail.md" \
        --set run.steps="$batches" --lockstep engine.slots=96 ${policy:+--set "model.path=$policy"} ${ARGS:-} > tail.log 2>&1
    [ -e "$out/tail.md" ] || python3 "$here/async_vs_lockstep.py" "$here/tail.toml" --dir "$runs" --out "$out/tail.md" --read > /dev/null
    awk 'NR % 5 == 1 || /finished/' tail.log | cut -c1-200 | tail -n 20
    for name in async lockstep; do
        show_logs "tail-$name"
        [ -e "$runs/tail-$name/report.md" ] || python3 "$here/report.py" "tail-$name" --dir "$runs" > /dev/null 2>&1
        cp "$runs/tail-$name/report.png" "$out/tail-$name.png" 2>/dev/null
        head -n 8 "$runs/tail-$name/report.md" 2>/dev/null
    done
    cat "$out/tail.md" 2>/dev/null
fi
# Without bus, checkpoints and weights, which are large; the engines' token stays here too.
(cd "$work" && find . -name '*.log' -o -name 'summary.json' -o -name 'config.json' -path '*/runs/*' -o -name 'report.md' -o -name 'versions.csv') |
    grep -v -e /hf/ -e /model/ -e /credentials/ | tar czf "$out/logs.tar.gz" -C "$work" -T -
keep_kernels "$out/triton.tar.gz"
ls -l "$out"
