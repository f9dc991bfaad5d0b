#!/usr/bin/env bash
# tests.sh [pytest's options]: the trainer's and the transport's tests that need a GPU (two show more), then what a version costs here.
#
# About four minutes on one H200. NO_BENCH=1 leaves the second part out. SGLang is not needed.
set -uo pipefail
# shellcheck disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$code" || exit
nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader
export CUBLAS_WORKSPACE_CONFIG=:4096:8
# The other tests' conftest needs plugins for asyncio and a message bus; these do without.
python3 -m pytest -c scripts/gpu/pytest.ini --rootdir . --confcutdir tests/trainers -m gpu -s -p no:cacheprovider \
    tests/core/test_digest_torch.py tests/trainers/test_torch_gpu.py tests/weights/test_ipc_gpu.py "$@"
result=$?
if [ -z "${NO_BENCH:-}" ]; then
    gpus=$(nvidia-smi --list-gpus | wc -l)
    python3 -m streamrl.bench.snapshots 0.6B 8B --trainer-gpu 0 --engine-gpu 0 || result=1
    if [ "$gpus" -gt 1 ]; then
        python3 -m streamrl.bench.snapshots 0.6B 8B --trainer-gpu 1 --engine-gpu 0 || result=1
    fi
fi
exit $result
