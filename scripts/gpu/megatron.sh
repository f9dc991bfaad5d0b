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
# "4b: 8b:tensor 8b:pipeline 30b-a3b-6:experts"): shape, what is set to 2, and after another colon what else is set of trainer, with commas
# between: "4b:tensor:micro_tokens=8192,activations=30". One that begins with torch/ is trained by the backend torch: "torch/4b:shards".
# MODELS: a folder in which models are kept from case to case. OUT (default ./out) gets megatron.txt, the whole output, and a folder for
# each benchmark. DEVICE=cpu tries the second part with tiny models.
#
# On two GPUs of 80 GB these fit (18 bytes a parameter, cut, and activations): CASES="4b:tensor:micro_tokens=8192
# 4b:pipeline:micro_tokens=8192,activations=14 30b-a3b-6:experts torch/4b:shards"
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
    cases=${CASES:-tiny: tiny:tensor tiny:pipeline:activations=1 tiny-moe:experts torch/tiny:shards} size=(--answers 16 --prompt 8 --batch-tokens 300 --rollouts 4 --steps 1)
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

# measure CASE: steps of one shape on two ranks.
measure() {
    local shape key more backend=megatron options=() began=$SECONDS left=$((${LIMIT:-570} - SECONDS - 15))
    IFS=: read -r shape key more <<< "$1"
    [ "${shape#torch/}" = "$shape" ] || backend=torch shape=${shape#torch/}
    local name="$backend-$shape-${key:-replicas}${more:+-${more//[^a-z0-9]/-}}"
    for option in ${key:+$key=2} ${more//,/ }; do options+=(--set "trainer.$option"); done
    [ -z "${MODELS:-}" ] || options+=(--model "$MODELS/$shape")
    [ "$left" -ge 30 ] || { echo "== no time left for $name"; return 1; }
    timeout --foreground --signal=INT --kill-after=10 "$left" python3 -m streamrl bench trainer --shape "$shape" "${size[@]}" --rounds 1 \
        --contenders streamrl --ranks 2 --set "trainer.backend=$backend" "${options[@]}" --out "$work/$name" > "$work/$name.log" 2>&1
    local code=$?
    [ $code -eq 0 ] || { echo "== $name: exit code $code"; grep -v Warning "$work/$name.log" | tail -n 30 | cut -c1-240; }
    mkdir -p "$out/$name" && cp "$work/$name.log" "$work/$name"/{raw.jsonl,table.md} "$out/$name/" 2> /dev/null
    echo "== $name: $((SECONDS - began)) s" && cut -c1-330 "$out/$name/table.md" 2> /dev/null
    grep -o 'event=rank_ended.*' "$work/$name.log"
    return $code
}

if [ -z "${NO_BENCH:-}" ]; then
    for case in $cases; do
        measure "$case" || result=1
    done > >(tee -a "$out/megatron.txt") 2>&1
fi
echo "== $SECONDS s in all"
exit $result
