#!/usr/bin/env bash
# step.sh [pytest's options]: the training step on one GPU: packed attention and the compiled head against float64, one compilation a run,
# the same digests from fresh and from warm caches, activations that fit, and seconds, tokens/s and peak memory of a step at 0.6B.
#
# LIMIT (default 460): seconds after which it is ended. OUT (default ./out) gets step.txt, the whole output, and measured.txt, its numbers.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=$(realpath -m "${OUT:-out}")
mkdir -p "$out"
cd "$code" || exit
nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader | tee "$out/step.txt"
export CUBLAS_WORKSPACE_CONFIG=:4096:8
# The other tests' conftest needs plugins for asyncio and a message bus; these do without.
timeout --kill-after=10 "${LIMIT:-460}" python3 -m pytest -c scripts/gpu/pytest.ini --rootdir . --confcutdir tests/trainers -m gpu -s \
    -p no:cacheprovider --durations=0 tests/trainers/test_step_gpu.py "$@" 2>&1 | tee -a "$out/step.txt"
result=$?
grep -F '[measured]' "$out/step.txt" > "$out/measured.txt"
exit $result
