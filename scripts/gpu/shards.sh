#!/usr/bin/env bash
# shards.sh [pytest's options]: a model cut into parts over this host's GPUs, two at least: meshes beside one GPU (float32 within the bound,
# equal digests, bfloat16 packed and compiled, equal bits on one mesh), what ranks publish of their parts and an engine reads, then training
# steps on two GPUs whole and in parts.
#
#   scripts/gpu/shards.sh
#   NO_BENCH=1 scripts/gpu/shards.sh -k bfloat16
#   NO_TESTS=1 SHAPES="8b" scripts/gpu/shards.sh
#
# LIMIT (default 570): seconds after which it is ended. SHAPES (default "4b 8b"; of 8b the whole does not fit on a GPU), GATHERS (default
# "step micro_batch"). OUT (default ./out) gets shards.txt, the whole output, measured.txt, the tests' numbers, and a folder for each
# benchmark. NVLink multicast stays as the host has it. DEVICE=cpu tries the second part with a tiny model.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=$(realpath -m "${OUT:-out}")
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$code" || exit
export CUBLAS_WORKSPACE_CONFIG=:4096:8
size=(--answers 1500 --batch-tokens 98304 --rollouts 4 --steps 2)
shapes=${SHAPES:-4b 8b}
if [ "${DEVICE:-}" = cpu ]; then
    export CUDA_VISIBLE_DEVICES="" NO_TESTS=1
    shapes=tiny size=(--answers 16 --prompt 8 --batch-tokens 300 --rollouts 4 --steps 1)
else
    nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader | tee "$out/shards.txt"
fi
result=0
if [ -z "${NO_TESTS:-}" ]; then
    # The other tests' conftest needs plugins for asyncio and a message bus; these do without.
    timeout --kill-after=10 $((${LIMIT:-570} - 20)) python3 -m pytest -c scripts/gpu/pytest.ini --rootdir . --confcutdir tests/trainers \
        -m gpu -s -p no:cacheprovider --durations=0 tests/trainers/test_shards_gpu.py tests/weights/test_ipc_gpu.py tests/weights/test_changes_gpu.py "$@" 2>&1 | tee -a "$out/shards.txt"
    result=$?
    grep -F '[measured]' "$out/shards.txt" > "$out/measured.txt"
fi

# measure NAME SHAPE OPTION...: steps of one shape on two ranks.
measure() {
    local name=$1 shape=$2 left=$((${LIMIT:-570} - SECONDS - 15))
    shift 2
    [ "$left" -ge 30 ] || { echo "== no time left for $name"; return 1; }
    timeout --foreground --signal=INT --kill-after=10 "$left" python3 -m streamrl bench trainer --shape "$shape" "${size[@]}" --rounds 1 \
        --contenders streamrl --ranks 2 "$@" --out "$work/$name" > "$work/$name.log" 2>&1
    local code=$?
    [ $code -eq 0 ] || { echo "== $name: exit code $code"; grep -v Warning "$work/$name.log" | tail -n 30 | cut -c1-240; }
    mkdir -p "$out/$name" && cp "$work/$name.log" "$work/$name"/{raw.jsonl,table.md} "$out/$name/" 2> /dev/null
    echo "== $name" && cut -c1-330 "$out/$name/table.md" 2> /dev/null
    return $code
}

if [ -z "${NO_BENCH:-}" ]; then
    for shape in $shapes; do
        [ "$shape" = 8b ] || measure "$shape-whole" "$shape" || result=1
        for gather in ${GATHERS:-step micro_batch}; do
            measure "$shape-$gather" "$shape" --set trainer.shards=2 --set "trainer.gather=$gather" || result=1
        done
    done > >(tee -a "$out/shards.txt") 2>&1
fi
echo "== $SECONDS s in all"
exit $result
