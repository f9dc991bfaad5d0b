"""How a rank swaps: what was asked for, what its model and its memory allow, and why."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import nn

from streamrl.engines.live_swap.messages import Settings
from streamrl.engines.live_swap.model import aliases, left_out


class Choice(msgspec.Struct, frozen=True):
    """`flip`, `copy`, `copy_pinned` or `none`, and the reason in words."""

    swap: str
    why: str


def choose(settings: Settings, model_runner: Any) -> Choice:
    """Decide once the model is loaded and before the KV cache takes the rest of the memory."""
    obstacle = _obstacle(model_runner)
    if obstacle:
        return Choice("none", obstacle)
    wanted = settings.swap
    left_behind = aliases(model_runner.model)
    if left_behind and wanted in ("auto", "flip"):
        return Choice("copy", f"parameters are also kept as {', '.join(left_behind[:3])}, which a flip would leave behind")
    if wanted != "auto":
        return Choice(wanted, "asked for")
    short = _memory_short(settings, model_runner)
    return Choice("copy_pinned", short) if short else Choice("flip", "a second buffer fits")


def _obstacle(model_runner: Any) -> str:
    """What rules out every way to change the weights."""
    args = model_runner.server_args
    if args.pp_size > 1:
        return "pipeline parallelism: ranks do not reach a commit before the same forward pass"
    if args.dp_size > 1:
        return "data parallelism within a server: start one engine for each replica"
    quantization = args.quantization or getattr(model_runner.model_config, "quantization", None)
    if quantization:
        return f"quantized weights ({quantization}): they are derived from a version's tensors"
    if getattr(args, "enable_eplb", False):
        return "expert load balancing moves experts between ranks"
    parameters = list(model_runner.model.parameters())
    if len({parameter.device for parameter in parameters}) != 1:
        return "weights on several devices (offloading)"
    packed = [name for name, module in model_runner.model.named_modules() if getattr(module, "use_intel_amx_backend", False)]
    if packed:
        return f"weights packed for the processor's matrix unit ({packed[0]} ...)"
    return _untrue(model_runner.model)


def _untrue(model: nn.Module) -> str:
    """Why what is copied to the parameters would not be all that is served, though its digest agreed; empty if it would."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "quant_method", None), "use_flashinfer_trtllm_moe", False):
            return f"{name} has its experts in the order of flashinfer_trtllm: set another moe_runner_backend"
    if found := left_out(model):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        return f"a version does not reach {found[0]}{more}: loaded once or computed from weights when they are loaded"
    return ""


def _memory_short(settings: Settings, model_runner: Any) -> str:
    """Why a second buffer beside the first would leave too little for the KV cache; empty if it would not."""
    parameters = list(model_runner.model.parameters())
    device = parameters[0].device
    if device.type != "cuda":
        return ""
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    before = int(model_runner.pre_model_load_memory * (1 << 30))
    return memory_short(free, before, nbytes, fraction=model_runner.mem_fraction_static, reserve=settings.reserve)


def memory_short(free: int, before: int, nbytes: int, *, fraction: float, reserve: float) -> str:
    """Why a second buffer of `nbytes` would leave too little for the KV cache; empty if it would not.

    Args:
        free: bytes that are free now, the model being loaded.
        before: bytes that were free before. SGLang counts by these, for others may have a part of the GPU, such as a trainer.
        nbytes: of the buffer.
        fraction: `mem_fraction_static`: SGLang leaves the rest of `before` free.
        reserve: part of `before` that the KV cache must have.
    """
    left = free - nbytes - (1 - fraction) * before
    if left >= reserve * before:
        return ""
    return (
        f"a second buffer of {nbytes / 1e9:.1f} GB would leave {max(0.0, left) / 1e9:.1f} GB for the KV cache "
        f"(mem_fraction_static {fraction} of {before / 1e9:.1f} GB, {reserve * before / 1e9:.1f} GB wanted)"
    )
