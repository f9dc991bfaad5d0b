"""SGLang's flags for each shape: on a GPU the smallest set that starts fast, on a CPU what it needs to start at all."""

from __future__ import annotations

from typing import Any

from benchmarks.shapes import Shape

_STATIC = {"tiny": 0.2, "tiny-moe": 0.2, "0.6B": 0.4, "4B": 0.5, "8B": 0.55, "30B-A3B": 0.5, "30B-A3B-6": 0.3}
"""SGLang's share of the memory, for both sets of weights and the KV cache; graphs, and a trainer on the same GPU, live in the rest."""
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


def server_flags(shape: Shape, *, streams: int, cpu: bool, default_graphs: bool) -> dict[str, Any]:
    """What to put into `engine.sglang.flags`.

    Args:
        shape: the model.
        streams: requests decoding at once.
        cpu: run without a GPU.
        default_graphs: capture graphs at all of SGLang's default sizes, prefill included (a start takes a minute longer). Otherwise
            decode graphs are captured at three sizes, the largest of them `streams`, and prefill runs eagerly.
    """
    flags = {
        **_COMMON,
        "mem_fraction_static": _STATIC[shape.name],
        # Half of the default pessimism about how many tokens requests will make: their real number is known here, and it fits.
        "schedule_conservativeness": 0.3,
    }
    if cpu:
        return {**flags, **_CPU}
    flags["attention-backend"] = "triton"
    if shape.experts:
        flags |= _EXPERTS
    if not default_graphs:
        sizes = sorted({1, max(1, streams // 2), streams})
        flags |= {"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": streams, "cuda_graph_bs_decode": sizes}
    return flags
