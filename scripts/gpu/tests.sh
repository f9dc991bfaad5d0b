#!/usr/bin/env bash
# tests.sh [pytest's options]: the tests of trainer, transport and weight staging that need a GPU (two show more: NCCL, weights from one
# GPU to the other), then what a version costs here.
#
# About four minutes on one H200. NO_BENCH=1 leaves the second part out, LIMIT (seconds) ends it. SGLang is not needed: it is tried on a
# GPU by one_gpu.sh, gsm8k.sh and bench_weights.sh. Tests of Ray on two GPUs need Ray and the plugins of `make test`: pytest -m gpu tests/ray
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$code" || exit
nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader
export CUBLAS_WORKSPACE_CONFIG=:4096:8
# The other tests' conftest needs plugins for asyncio and a message bus; these do without.
python3 -m pytest -c scripts/gpu/pytest.ini --rootdir . --confcutdir tests/trainers -m gpu -s -p no:cacheprovider \
    tests/tensors/test_digest_gpu.py tests/trainers/test_torch_gpu.py tests/trainers/test_ranks.py tests/weights/test_ipc_gpu.py tests/weights/test_changes_gpu.py "$@"
result=$?
# Its folder's conftest needs such plugins, too, and this file none of its fixtures.
python3 -m pytest -c scripts/gpu/pytest.ini --rootdir . --noconftest -m gpu -s -p no:cacheprovider tests/engines/live_swap/test_recorder.py "$@" || result=1
# measure GPU: what a version costs with the trainer's weights on that one.
measure() {
    local left=$((${LIMIT:-3600} - SECONDS))
    [ $left -ge 20 ] || { echo "== no time left for snapshots of GPU $1"; return 1; }
    timeout --kill-after=10 "$left" python3 -m benchmarks.weights.snapshots 0.6B 8B --trainer-gpu "$1" --engine-gpu 0
}
if [ -z "${NO_BENCH:-}" ]; then
    gpus=$(count_gpus)
    measure 0 || result=1
    if [ "$gpus" -gt 1 ]; then
        measure 1 || result=1
    fi
fi
exit $result
