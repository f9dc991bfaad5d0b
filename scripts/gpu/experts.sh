#!/usr/bin/env bash
# experts.sh [pytest's options]: mixtures of experts on this host's first GPU: the grouped products against float64, equal digests from
# fresh processes, one compilation a run; then training steps of 30B-A3B cut to 6 layers, rows of 8,192, beside a plain compiled loop.
#
#   scripts/gpu/experts.sh                       # an estimated 500 s on an H200
#   NO_TESTS=1 scripts/gpu/experts.sh            # the training steps alone, an estimated 300 s; NO_BENCH=1: the tests alone
#   DEVICE=cpu NO_TESTS=1 scripts/gpu/experts.sh # whether it works at all: a tiny mixture, no GPU
#
# LIMIT (default 560): seconds after which all must have ended. OUT (default ./out) gets experts.txt, the tests' output, and what
# bench_trainer.sh leaves there. OPTIONS go to streamrl bench trainer, ROUNDS (default 1) and STEPS (default 3) as well.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck disable=SC1091
source "$here/environment.sh"
OUT=$(realpath -m "${OUT:-out}")
export OUT
mkdir -p "$OUT"
limit=${LIMIT:-560} result=0
if [ -z "${NO_TESTS:-}" ]; then
    # The other tests' conftest needs plugins for asyncio and a message bus; these do without.
    (cd "$code" && CUBLAS_WORKSPACE_CONFIG=:4096:8 timeout --kill-after=10 "$((limit / 2))" python3 -m pytest -c scripts/gpu/pytest.ini \
        --rootdir . --confcutdir tests/trainers -m gpu -s -p no:cacheprovider --durations=0 tests/trainers/test_experts_gpu.py "$@") 2>&1 |
        tee "$OUT/experts.txt" || result=1
fi
if [ -z "${NO_BENCH:-}" ]; then
    TINY=tiny-moe LIMIT=$((limit - SECONDS)) ROUNDS=${ROUNDS:-1} STEPS=${STEPS:-3} \
        OPTIONS="$([ "${DEVICE:-}" = cpu ] || echo "--answers 1500") --contenders streamrl,plain ${OPTIONS:-}" \
        "$here/bench_trainer.sh" 30b-a3b-6 || result=1
fi
exit $result
