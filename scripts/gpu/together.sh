#!/usr/bin/env bash
# together.sh QUESTION:GPUS ... [-- OPTIONS]: several questions at once on one host, each on GPUs and cores of its own.
#
#   scripts/gpu/together.sh 8b:0,1 graphs:2,3
#   scripts/gpu/together.sh 30b:0,1,2 tests:3
#
# QUESTION is one of bench_weights.sh (8b, small, 30b, beside, graphs, wide, tiny), gsm8k-all, gsm8k-train or gsm8k-tail (gsm8k.sh), or tests
# (tests.sh). GPUS are numbers as nvidia-smi has them; none after the colon: the question gets no GPU. OPTIONS go to bench_weights.sh.
#
# Ports are free ones for everything that listens; folders and GPU memory are apart too, memory bandwidth of the host is not.
# All end within LIMIT seconds (default 570) and keep what they have by then: OUT (default ./out) gets NUMBER-QUESTION.tar for each, with
# all it wrote and screen.txt, and the compiled kernels (triton.tar.gz). The screens' ends are shown here, one after the other.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
set -m  # every question is a process group, which can be ended as a whole
limit=${LIMIT:-570}
out=$(mkdir -p "${OUT:-out}" && cd "${OUT:-out}" && pwd)
work=${WORK:-/tmp/together}

questions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    questions+=("$1")
    shift
done
[ "${1:-}" = -- ] && shift
[ ${#questions[@]} -gt 0 ] || { echo "usage: together.sh QUESTION:GPUS ... [-- OPTIONS]" >&2; exit 2; }
for question in "${questions[@]}"; do
    case $question in
        8b:* | small:* | 30b:* | beside:* | graphs:* | wide:* | tiny:* | gsm8k-all:* | gsm8k-train:* | gsm8k-tail:* | tests:*) ;;
        *) echo "together.sh: expected QUESTION:GPUS with a QUESTION out of those in $0, got $question" >&2; exit 2 ;;
    esac
done
doubled=$(printf '%s\n' "${questions[@]#*:}" | tr ',' '\n' | sort | uniq -d | tr -d '\n')
[ -z "$doubled" ] || { echo "together.sh: expected each GPU in one question, got $doubled in two" >&2; exit 2; }

# ask NUMBER NAME GPUS CORES OPTIONS...: one question, in a process group of its own.
ask() {
    local name=$2 cores=$4 folder=$work/$1-$2
    export CUDA_VISIBLE_DEVICES=$3 WORK=$folder/work OUT=$folder/out LIMIT=$((limit - SECONDS - 20))
    shift 4
    local command=("$code/scripts/gpu/bench_weights.sh" "$name" "$@")
    case $name in
        gsm8k-*) command=("$code/scripts/gpu/gsm8k.sh" "${name#gsm8k-}") ;;
        tests) command=("$code/scripts/gpu/tests.sh") ;;
    esac
    exec taskset -c "$cores" bash "${command[@]}" > "$folder/out/screen.txt" 2>&1
}

cores=$(env -u OMP_NUM_THREADS nproc)  # which counts threads of OpenMP otherwise
share=$((cores / ${#questions[@]}))
[ "$share" -ge 1 ] || share=1
rm -rf "$work"
folders=() ids=()
for i in "${!questions[@]}"; do
    name=${questions[$i]%%:*}
    mkdir -p "$work/$i-$name/out"
    folders+=("$i-$name")
    core=$((i * share % cores))
    ask "$i" "$name" "${questions[$i]#*:}" "$core-$((core + share - 1))" "$@" &
    ids+=($!)
    echo "== ${questions[$i]}: cores $core-$((core + share - 1))"
done

left() { [ -n "$(jobs -rp)" ]; }
while left && [ $SECONDS -lt $((limit - 15)) ]; do sleep 1; done
if left; then
    echo "== $SECONDS s are over: ended what still ran"
    for signal in TERM KILL; do
        for id in "${ids[@]}"; do kill -s "$signal" -- "-$id" 2> /dev/null; done
        sleep 3
    done
fi
result=0
for i in "${!ids[@]}"; do
    wait "${ids[$i]}"
    code_of=$?
    [ $code_of -eq 0 ] || result=1
    folder=$work/${folders[$i]}/out
    echo && echo "== ${questions[$i]}: exit code $code_of" && tail -n "${LINES_EACH:-45}" "$folder/screen.txt" | cut -c1-330
    mv -f "$folder/triton.tar.gz" "$out/" 2> /dev/null
    tar cf "$out/${folders[$i]}.tar" -C "$folder" .
done
ls -l "$out"
exit $result
