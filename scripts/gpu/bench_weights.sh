#!/usr/bin/env bash
# bench_weights.sh QUESTION [options of streamrl bench weights]: one question about weight updates on this host's GPUs.
#
#   8b       8B, trainer's weights on the second GPU (one GPU: on the engine's): every mode, about 5 minutes
#   small    0.6B and 4B on one GPU, trainer's weights beside the engine's
#   30b      30B-A3B on two GPUs (TP 2), trainer's weights on a third where there is one
#   beside   30B-A3B on two GPUs (TP 2), trainer's weights cut over the same two
#   graphs   8B with graphs at all of SGLang's default sizes: what the second set costs
#   wide     8B, 256 streams
#   tiny     a tiny model on the CPU: whether this script and its surroundings work at all
#
# OUT (default ./out) gets QUESTION-SHAPE.tar.gz (raw file, server's log) and the last lines on the screen are the tables.
# LIMIT: seconds after which all must have ended; what was measured by then is kept. WORK (default /tmp/bench): for raw files.
# Make the table and the picture again from the raw file: tar xzf ..., streamrl bench weights --report DIR
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
question=${1:?usage: bench_weights.sh 8b|small|30b|beside|graphs|wide|tiny [options]}
shift
out=${OUT:-out}
mkdir -p "$out"
if [ "$question" != tiny ]; then
    nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader
    nvidia-smi topo -m | grep -E '^(GPU|\s+GPU)' | cut -c1-80
fi

# measure SHAPE SECONDS OPTIONS...: one server, one run; a run that hangs is ended and what it left is kept.
measure() {
    local shape=$1 limit=$2 dir=${WORK:-/tmp/bench}/$question-$1
    local left=$((${LIMIT:-3600} - SECONDS - 45))  # what comes after a run that was ended takes half a minute
    shift 2
    [ "$left" -ge 30 ] || { echo "== no time left for $shape"; result=1; return; }
    rm -rf "$dir" && mkdir -p "$dir"
    timeout --foreground --kill-after=20 $((left < limit ? left : limit)) \
        python3 -m streamrl bench weights --shape "$shape" --out "$dir" "$@" > "$dir/bench.log" 2>&1
    local code=$?
    if [ ! -e "$dir/table.md" ] && [ -e "$dir/raw.jsonl" ]; then  # it broke off: show what there is
        sleep 3
        python3 -m streamrl bench weights --report "$dir" >> "$dir/bench.log" 2>&1
    fi
    if [ $code -ne 0 ]; then
        result=1
        echo "== $shape: exit code $code"
        tail -n 30 "$dir/bench.log"
        tail -n 25 "$dir/server.log" 2>/dev/null
    fi
    cp "$dir/table.md" "$out/$question-$shape.md" 2>/dev/null
    cp "$dir/weights.png" "$out/$question-$shape.png" 2>/dev/null
    tar czf "$out/$question-$shape.tar.gz" -C "$(dirname "$dir")" "$(basename "$dir")"
    tables+=("$dir/table.md")
}

# Ours, then stock's, every window between steady ones.
ours=steady:8,paced:16/1,steady:8,paced:20/10,steady:8,flip:12/1,steady:8,copy:8/1,steady:6
stock=tensor:8/1,steady:6
engine=1  # GPUs of the engine; NCCL wants the trainer's weights on another one
[ "$question" = 30b ] && engine=2
[ "$question" = tiny ] || [ "$(count_gpus)" -le $engine ] || stock=$stock,distributed:8/1,steady:6
short=steady:8,paced:12/1,steady:8,flip:12/1,steady:8,$stock

tables=() result=0
case $question in
    8b) measure 8B 510 --plan "$ours,$stock,disk:10/8,steady:6" --streams 128 --tokens 1500 "$@" ;;
    wide) measure 8B 420 --plan "$short" --streams 256 --tokens 1200 "$@" ;;
    small)
        measure 0.6B 260 --plan "$short" --streams 128 --tokens 1500 "$@"
        measure 4B 300 --plan "$short" --streams 128 --tokens 1500 "$@"
        ;;
    30b) measure 30B-A3B 520 --plan "$short" --streams 128 --tokens 1000 "$@" ;;
    beside)
        measure 30B-A3B 520 --plan steady:10,flip:20/1,steady:10,flip:20/1,steady:10 --trainer-device cuda:0,cuda:1 --streams 128 --tokens 1000 "$@"
        ;;
    graphs) measure 8B 520 --plan steady:6,paced:10/1,steady:6 --streams 128 --tokens 1500 --default-graphs "$@" ;;
    tiny) CUDA_VISIBLE_DEVICES="" measure tiny 240 "$@" ;;
    *) echo "bench_weights.sh: expected 8b, small, 30b, beside, graphs, wide or tiny, got $question" >&2; exit 2 ;;
esac
keep_kernels "$out/triton.tar.gz"
for table in "${tables[@]}"; do
    [ -e "$table" ] && echo && cut -c1-330 "$table"
done
exit $result
