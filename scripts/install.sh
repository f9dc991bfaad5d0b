#!/usr/bin/env bash
# Make .venv and install streamrl into it, editable.  Usage: scripts/install.sh [dev]
# Or make .venv-sglang with SGLang for CPUs, for tests and trials without a GPU.  Usage: scripts/install.sh sglang-cpu
# Or make .venv-verifiers and .venv-openenv, for tasksets of verifiers and for the tests of OpenEnv.  Usage: scripts/install.sh verifiers
# Or make .venv-megatron with the newest megatron-core, on Python 3.12 or later, for its tests.  Usage: scripts/install.sh megatron
#   PYTHON  interpreter to build the environment from (3.11 or later); default: the newest of python3, python3.13 ... python3.11
#   TORCH   cpu | cuda | a requirement such as torch==2.12.1; default: cuda where nvidia-smi finds a GPU, else cpu
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
sglang_version=0.5.23
megatron_version=0.19.2 # requirements.lock has the newest for Python 3.11
trl_version=1.16.0
cpu_torch=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu

fail() {
    printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$name"
            return
        fi
    done
    fail "expected Python 3.11 or later, got ${PYTHON:-$(python3 --version 2>&1 || true)}" \
        "install Python 3.11 or later, or name one: make up PYTHON=/path/to/python3.12"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv or ensurepip module, which makes the virtual environment" \
            "on Debian and Ubuntu: apt install python3-venv; or name another interpreter: make up PYTHON=..."
    echo "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
}

# A CPU build first where there is no GPU. --no-deps: one look at the extra index, so that an unreachable one costs seconds, not
# one timeout per dependency; the dependencies come with streamrl below.
install_torch() {
    local build=${TORCH:-}
    if [ -z "$build" ]; then
        build=cpu
        if nvidia-smi -L >/dev/null 2>&1; then build=cuda; fi
    fi
    echo "installing torch: $build"
    case $build in
        cpu)
            if [ "$(uname -s)" = Linux ]; then
                if pip install --no-deps "torch==$cpu_torch+cpu" --extra-index-url "$cpu_index" --retries 0 --timeout 15; then return; fi
                echo "no CPU build of torch $cpu_torch was found; taking the default build, which is a large download" >&2
            fi
            pip install "torch==$cpu_torch"
            ;;
        cuda) pip install torch ;;
        *) pip install "$build" ;;
    esac
}

# Nothing is compiled ahead of time: most modules are never imported, and the others are compiled by whoever imports them first. Wheels that
# were downloaded before come from pip's own cache (PIP_CACHE_DIR), where it has one.
pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" --no-compile --quiet --quiet
}

# True only for a missing torch or a build that was asked for by name.
needs_torch() {
    [ -n "${TORCH:-}" ] || ! "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
}

# An environment of its own: SGLang wants exact versions of torch, transformers and others, and of them the builds for CUDA.
install_sglang_cpu() {
    venv=${SGLANG_VENV:-.venv-sglang}
    TORCH=cpu
    [ -x "$venv/bin/pip" ] || make_venv
    if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then install_torch; fi
    echo "installing SGLang $sglang_version for CPUs; this takes one or two minutes and 2.3 GB"
    pip install --no-deps --requirement scripts/sglang_cpu/requirements.txt
    pip install --no-deps "sglang==$sglang_version"
    cp scripts/sglang_cpu/stubs/*.py "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    touch "$venv/.installed"
}

# Environments of their own: the two want other versions of mcp, and both another openai than SGLang. The lists are whole, so that pip
# resolves nothing. Both are made at the same time: half of it is waiting.
install_verifiers() {
    echo "installing verifiers 0.4.0 and OpenEnv 0.10.0, each on its own; this takes a minute or two and 0.7 GB"
    local openenv
    make_listed "${OPENENV_VENV:-.venv-openenv}" scripts/verifiers/openenv.txt &
    openenv=$!
    make_listed "${VERIFIERS_VENV:-.venv-verifiers}" scripts/verifiers/requirements.txt
    wait "$openenv"
}

make_listed() {
    venv=$1
    [ -x "$venv/bin/pip" ] || make_venv
    pip install --no-deps --requirement "$2"
    touch "$venv/.installed"
}

# An environment of its own, because this megatron-core is not for Python 3.11; else it has what CI tests.
install_megatron() {
    venv=${MEGATRON_VENV:-.venv-megatron}
    TORCH=cpu
    if [ ! -x "$venv/bin/pip" ]; then
        PYTHON=$(find_newer_python)
        make_venv
    fi
    if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then install_torch; fi
    echo "installing megatron-core $megatron_version and streamrl; with torch this takes two minutes and 5 GB"
    pip install --editable '.[megatron]' "megatron-core==$megatron_version" pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis \
        --constraint <(grep -v '^megatron-core==' requirements.lock)
    touch "$venv/.installed"
}

# Python 3.12 or 3.13: of PATH, else of pyenv, whose commands stand for the version that is chosen alone.
find_newer_python() {
    local name
    for name in python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null; then
            printf '%s' "$name"
            return
        fi
    done
    fail "expected Python 3.12 or 3.13, got none" "install one: megatron-core $megatron_version is not for Python 3.11"
}

# One command a line: behind && or in a condition the shell would go on after an error.
if [ "${1:-}" = sglang-cpu ]; then
    install_sglang_cpu
    exit
fi
if [ "${1:-}" = verifiers ]; then
    install_verifiers
    exit
fi
if [ "${1:-}" = megatron ]; then
    install_megatron
    exit
fi
if [ "${1:-}" = megatron-python ]; then # which interpreter that takes, for .ci/megatron
    find_newer_python
    exit
fi
if [ "${1:-}" = megatron-torch ]; then # whether a CPU build of torch is found for that interpreter; nothing is installed
    "$(find_newer_python)" -m pip install --dry-run --no-deps --ignore-installed "torch==$cpu_torch+cpu" --extra-index-url "$cpu_index" \
        --retries 0 --timeout 15 --quiet --quiet --disable-pip-version-check
    exit
fi
[ -x "$venv/bin/pip" ] || make_venv
if needs_torch; then install_torch; fi
echo "installing streamrl${1:+ with the extra '$1'}; this takes a minute or two"
# All that the lock has is what the extra `dev` needs, where the lock was made; what pip then finds to be there it neither fetches nor resolves.
if [ "${1:-}" = dev ] && "$venv/bin/python" -c 'import sys; sys.exit(sys.platform != "linux" or sys.version_info[:2] != (3, 11))'; then
    pip install --no-deps --requirement requirements.lock
fi
pip install --editable ".${1:+[$1]}" --constraint requirements.lock
# For its copies of models' chat templates alone, which tests read as files: without what it needs to be imported.
if [ "${1:-}" = dev ]; then pip install --no-deps "trl==$trl_version"; fi
touch "$venv/.installed${1:+-$1}"
