# Source me: a GPU host without a network gets SGLang and what else is missing from a carried folder, this code from where it lies.
#
# KIT (default .kit) holds activate.sh, which unpacks packages and puts them on PYTHONPATH; without it the host's own Python must have
# SGLang. TRITON (default $KIT/triton.tar.gz) holds compiled kernels of an earlier call, which save a minute of the first start.
code=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
kit=${KIT:-.kit}
if [ -e "$kit/activate.sh" ]; then
    # shellcheck disable=SC1091
    source "$kit/activate.sh"
fi
export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$HOME/.triton/cache}
triton_cache=$TRITON_CACHE_DIR
if [ -e "${TRITON:-$kit/triton.tar.gz}" ] && [ ! -e "$triton_cache" ]; then
    mkdir -p "$triton_cache" && tar xzf "${TRITON:-$kit/triton.tar.gz}" -C "$triton_cache"
fi

# How many GPUs this process may use.
count_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c .
    else
        nvidia-smi --list-gpus 2> /dev/null | wc -l
    fi
}

# Keep the compiled kernels for the next host, if they are few enough to travel.
keep_kernels() {
    [ -d "$triton_cache" ] || return 0
    tar czf "$1" -C "$triton_cache" . && [ "$(stat -c %s "$1")" -lt 16000000 ] || rm -f "$1"
}

# within SECONDS COMMAND...: never past LIMIT seconds (default 480) of the script in all; a run is drained by the interrupt.
within() {
    local limit=$1 left=$((${LIMIT:-480} - SECONDS - 20))
    shift
    [ "$left" -ge 15 ] || { echo "== no time left for: $*"; return 1; }
    timeout --foreground --signal=INT --kill-after=25 $((left < limit ? left : limit)) "$@"
    local status=$?
    [ $status -eq 0 ] || echo "== exit code $status: $*"
    return $status
}
