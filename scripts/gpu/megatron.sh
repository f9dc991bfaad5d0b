#!/usr/bin/env bash
# megatron.sh [pytest's options]: the backend megatron on this host's GPUs, two at least: tensor ranks, stages, replicas and divided experts over
# NCCL beside the torch backend on one GPU; then training steps on two: 4B in replicas, 8B on two tensor ranks and on two stages, 30B-A3B cut to
# 6 layers with its experts divided.
#
#   scripts/gpu/megatron.sh
#   NO_BENCH=1 scripts/gpu/megatron.sh -k tensor
#   NO_TESTS=1 CASES="8b:tensor" scripts/gpu/megatron.sh
#
# It needs megatron-core >= 0.16 and < 0.20, einops and psutil. LIMIT (default 570): seconds after which it is ended. CASES (default
# "4b: 8b:tensor 8b:pipeline 30b-a3b-6:experts"): shape and what is set to 2. OUT (default ./out) gets megatron.txt, the whole output, and a folder for
# each benchmark. DEVICE=cpu tries the second part with tiny models.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=$(realpath -m "${OUT:-out}")
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$code" || exit
export CUBLAS_WORKSPACE_CONFIG=:4096:8 CUDA_DEVICE_MAX_CONNECTIONS=1
size=(--answers 1500 --batch-tokens 98304 --rollouts 4 --steps 2)
cases=${CASES:-4b: 8b:tensor 8b:pipeline 30b-a3b-6:experts}
if [ "${DEVICE:-}" = cpu ]; then
    export CUDA_VISIBLE_DEVICES="" NO_TESTS=1
    cases="tiny: tiny:tensor tiny:pipeline tiny-moe:experts" size=(--answers 16 --prompt 8 --batch-tokens 300 --rollouts 4 --steps 1)
else
    nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader | tee "$out/megatron.txt"
fi
result=0
if [ -z "${NO_TESTS:-}" ]; then
    # The other tests' conftest needs plugins for asyncio and a message bus; these do without.
    timeout --kill-after=10 $((${LIMIT:-570} / 2)) python3 -m pytest -c scripts/gpu/pytest.ini --rootdir . --confcutdir tests/trainers \
        -m gpu -s -p no:cacheprovider --durations=0 tests/trainers/megatron/test_megatron_gpu.py "$@" 2>&1 | tee -a "$out/megatron.txt"
    result=$?
fi

# measure SHAPE KEY: steps of one shape on two ranks, with trainer.KEY = 2.
measure() {
    local name="$1-${2:-replicas}" left=$((${LIMIT:-570} - SECONDS - 15))
    [ "$left" -ge 30 ] || { echo "== no time left for $name"; return 1; }
    timeout --foreground --signal=INT --kill-after=10 "$left" python3 -m streamrl bench trainer --shape "$1" "${size[@]}" --rounds 1 \
        --contenders streamrl --ranks 2 --set trainer.backend=megatron ${2:+--set "trainer.$2=2"} --out "$work/$name" > "$work/$name.log" 2>&1
    local code=$?
    [ $code -eq 0 ] || { echo "== $name: exit code $code"; grep -v Warning "$work/$name.log" | tail -n 30 | cut -c1-240; }
    mkdir -p "$out/$name" && cp "$work/$name.log" "$work/$name"/{raw.jsonl,table.md} "$out/$name/" 2> /dev/null
    echo "== $name" && cut -c1-330 "$out/$name/table.md" 2> /dev/null
    return $code
}

if [ -z "${NO_BENCH:-}" ]; then
    for case in $cases; do
        measure "${case%%:*}" "${case##*:}" || result=1
    done > >(tee -a "$out/megatron.txt") 2>&1
fi
echo "== $SECONDS s in all"
exit $result
