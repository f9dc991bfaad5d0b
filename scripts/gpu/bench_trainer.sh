#!/usr/bin/env bash
# bench_trainer.sh [SHAPE...]: training steps on this host's first GPU, the product's trainer beside a plain compiled loop.
#
#   scripts/gpu/bench_trainer.sh              # 0.6b and 4b, a round each: an estimated 400 s on an H200
#   scripts/gpu/bench_trainer.sh 4b           # one shape, two rounds
#   DEVICE=cpu scripts/gpu/bench_trainer.sh   # whether it works at all: a tiny model (TINY=tiny-moe: a mixture), no GPU
#
# Answers of 1,500 and 8,000 tokens; OPTIONS ("--set trainer.compile=off") go to streamrl bench trainer, ROUNDS and STEPS as well.
# OUT (default ./out) gets SHAPE.tar.gz (raw file, report, picture, log) and SHAPE.md; the last lines on the screen are the tables.
# LIMIT (default 470): seconds after which all must have ended; what was measured by then is kept. WORK (default /tmp/bench-trainer): raw
# files. Table and picture again from the raw file: tar xzf ..., streamrl bench trainer --report DIR
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
work=${WORK:-/tmp/bench-trainer}
shapes=("${@,,}") # the command takes either case
[ $# -gt 0 ] || shapes=(0.6b 4b)
rounds=${ROUNDS:-$((${#shapes[@]} > 1 ? 1 : 2))}
size=(--answers 1500,8000 --batch-tokens 98304 --rollouts 4)
if [ "${DEVICE:-}" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=""
    shapes=("${TINY:-tiny}") size=(--answers 16 --prompt 8 --batch-tokens 300 --rollouts 4)
else
    nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader
fi

# measure SHAPE: one run; one that has no time left is ended and what it left is kept.
measure() {
    local shape=$1 dir=$work/$1 left=$((${LIMIT:-470} - SECONDS - 20))
    [ "$left" -ge 30 ] || { echo "== no time left for $shape"; return 1; }
    rm -rf "$dir" && mkdir -p "$dir"
    # shellcheck disable=SC2086
    timeout --foreground --signal=INT --kill-after=10 "$left" python3 -m streamrl bench trainer --shape "$shape" "${size[@]}" \
        --rounds "$rounds" --steps "${STEPS:-2}" --out "$dir" ${OPTIONS:-} > "$dir/bench.log" 2>&1
    local code=$?
    if [ ! -e "$dir/table.md" ] && [ -e "$dir/raw.jsonl" ]; then # it broke off: show what there is
        python3 -m streamrl bench trainer --report "$dir" >> "$dir/bench.log" 2>&1
    fi
    [ $code -eq 0 ] || { echo "== $shape: exit code $code"; grep -v Warning "$dir/bench.log" | tail -n 30 | cut -c1-240; }
    cp "$dir/table.md" "$out/$shape.md" 2> /dev/null
    tar czf "$out/$shape.tar.gz" -C "$work" "$shape"
    return $code
}

result=0
for shape in "${shapes[@]}"; do
    measure "$shape" || result=1
done
for shape in "${shapes[@]}"; do
    [ -e "$out/$shape.md" ] && echo && cut -c1-330 "$out/$shape.md"
done
echo "== $SECONDS s in all"
exit $result
