#!/usr/bin/env bash
# context.sh [pytest's options]: ranks that share packed rows (trainer.context) over two GPUs of this host: the tests against one GPU, then
# one sample of 64k tokens of a 4B model on one GPU and on two, with layers as they are and compiled: peak of a rank's activations (0.6 of one
# GPU's at most), log-probs, gradients, seconds.
#
#   scripts/gpu/context.sh
#   NO_TESTS=1 TOKENS=131072 scripts/gpu/context.sh
#
# LIMIT (default 570): seconds after which it is ended. SHAPE (default 4b), TOKENS (default 65536), WAYS (default "plain compiled"). OUT
# (default ./out) gets context.txt, the whole output, measured.txt, the tests' numbers, and context-plain.json, context-compiled.json.
# NVLink multicast stays as the host has it. DEVICE=cpu tries the second part with a tiny model.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=$(realpath -m "${OUT:-out}")
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$code" || exit
export CUBLAS_WORKSPACE_CONFIG=:4096:8
shape=${SHAPE:-4b} size=(--tokens "${TOKENS:-65536}")
if [ "${DEVICE:-}" = cpu ]; then
    export CUDA_VISIBLE_DEVICES="" NO_TESTS=1
    shape=tiny size=(--tokens "${TOKENS:-256}" --trained 64 --device cpu)
else
    nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader | tee "$out/context.txt"
fi
result=0
if [ -z "${NO_TESTS:-}" ]; then
    # The other tests' conftest needs plugins for asyncio and a message bus; these do without.
    timeout --kill-after=10 $((${LIMIT:-570} - 20)) python3 -m pytest -c scripts/gpu/pytest.ini --rootdir . --confcutdir tests/trainers \
        -m gpu -s -p no:cacheprovider --durations=0 tests/trainers/test_context_gpu.py "$@" 2>&1 | tee -a "$out/context.txt"
    result=$?
    grep -F '[measured]' "$out/context.txt" > "$out/measured.txt"
fi
python3 scripts/gpu/one_gpu.py model "$shape" "$work/model" 2>&1 | tee -a "$out/context.txt" || exit
for way in ${WAYS:-plain compiled}; do
    left=$((${LIMIT:-570} - SECONDS - 15))
    [ "$left" -ge 30 ] || { echo "== no time left for $way" | tee -a "$out/context.txt"; result=1; break; }
    compile=()
    [ "$way" = compiled ] && compile=(--compile)
    echo "== $way" | tee -a "$out/context.txt"
    timeout --foreground --signal=INT --kill-after=10 "$left" python3 scripts/gpu/context.py --model "$work/model" "${size[@]}" \
        "${compile[@]}" --out "$out/context-$way.json" 2>&1 | tee -a "$out/context.txt" || result=1
done
echo "== $SECONDS s in all"
exit $result
