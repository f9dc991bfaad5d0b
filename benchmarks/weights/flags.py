"""SGLang's flags for each shape: on a GPU the smallest set that starts fast, on a CPU what it needs to start at all."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.shapes import Shape, num_elements
from streamrl.errors import ConfigError

_MOST_STATIC = 0.92
"""The largest share that leaves room for activations and graphs."""
_CPU_STATIC = 0.2
_COMMON: dict[str, Any] = {
    "load_format": "dummy",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
}
_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "max_total_tokens": 16_384,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
}
_EXPERTS: dict[str, Any] = {
    # Without these FlashInfer compiles kernels for minutes when the server starts.
    "moe_runner_backend": "triton",
    "enforce_disable_flashinfer_allreduce_fusion": True,
    "disable_flashinfer_autotune": True,
}


def static_share(shape: Shape, gpu_bytes: int, *, tensor_parallel: int, streams: int, tokens: int, beside: int = 0) -> float:
    """Return SGLang's share of a GPU's memory (`mem_fraction_static`), in hundredths.

    It holds both sets of weights and the keys and values of all requests at their mean length, so that none is retracted, or as many of
    them as fit. Graphs, activations, and a trainer on the same GPU live in the rest.

    Args:
        shape: the model.
        gpu_bytes: memory of one GPU.
        tensor_parallel: GPUs that one engine is spread over.
        streams: requests decoding at once.
        tokens: mean length of a request, prompt included.
        beside: bytes that others need on the same GPU.

    Raises:
        ConfigError: the two sets of weights alone do not fit.
    """
    weights = 2 * shape.item_bytes * num_elements(shape) // tensor_parallel
    keys_and_values = 2 * shape.item_bytes * shape.layers * shape.kv_heads * shape.head_dim * streams * tokens // tensor_parallel
    most = _MOST_STATIC - beside / gpu_bytes
    if weights * 1.05 > most * gpu_bytes:
        raise ConfigError(
            f"{shape.name}: expected GPUs that hold two sets of its weights, {weights / 2**30:.1f} GiB on each of {tensor_parallel}, in "
            f"{_MOST_STATIC:.0%} of their memory beside {beside / 2**30:.1f} GiB of the trainer's; got {gpu_bytes / 2**30:.1f} GiB",
            hint="spread the engine over more GPUs with --tensor-parallel, or give the trainer's weights a GPU with --trainer-device",
            shape=shape.name,
        )
    return min(math.floor(100 * most) / 100, math.ceil(100 * (weights + keys_and_values) * 1.05 / gpu_bytes) / 100)


def server_flags(shape: Shape, *, streams: int, default_graphs: bool, share: float | None) -> dict[str, Any]:
    """Return the flags for `engine.sglang.flags`.

    Args:
        shape: the model.
        streams: requests decoding at once.
        share: `mem_fraction_static` on a GPU; None runs without one.
        default_graphs: capture graphs at all of SGLang's default sizes, prefill included (a start takes a minute longer). Otherwise
            decode graphs are captured at three sizes, the largest of them `streams`, and prefill runs eagerly.
    """
    flags = {
        **_COMMON,
        "mem_fraction_static": _CPU_STATIC if share is None else share,
        # Half of the default pessimism about how many tokens requests will make: their real number is known here, and it fits.
        "schedule_conservativeness": 0.3,
    }
    if share is None:
        return {**flags, **_CPU}
    flags["attention-backend"] = "triton"
    if shape.experts:
        flags |= _EXPERTS
    if not default_graphs:
        sizes = sorted({1, max(1, streams // 2), streams})
        flags |= {"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": streams, "cuda_graph_bs_decode": sizes}
    return flags
