"""By which kernels the models of a trainer are run: chosen once, from the configuration and the device."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch

from streamrl.config.tree import Config
from streamrl.errors import ConfigError


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """What `CausalLM` is told; it may find out that a model cannot do all of it."""

    attention: Literal["sdpa", "packed", "flash"] = "sdpa"
    """See `TrainerConfig`."""
    free_attention: bool = False
    """Whether `attention` was chosen here, and not by the configuration."""
    compile: bool = False
    """Run layers and head as torch.compile makes them, on packed rows only."""
    free_compile: bool = False
    """Whether a record may say otherwise: the configuration does not, and layers can be compiled."""
    kept_layers: int | Literal["auto"] | None = None
    """Layers that keep their activations; None: all, `auto`: as many as the memory is enough for."""


def choose_kernels(config: Config, device: torch.device, dtype: torch.dtype) -> Kernels:
    """What the configuration's `auto` means here.

    Rows are packed on a GPU in bfloat16, which torch's variable-length attention needs, and wherever ranks share them. Compiled kernels are
    not known to give the same bits in each process, so with run.numerics = "bitwise" there are none unless they are asked for. With tensor
    ranks, which wait for each other within a layer, there never are.

    Raises:
        ConfigError: compiled layers were asked for with rows that are not packed.
    """
    trainer = config.trainer
    cuda = device.type == "cuda"
    attention = trainer.attention
    if attention == "auto":
        attention = "packed" if trainer.context > 1 or (cuda and dtype in (torch.bfloat16, torch.float16)) else "sdpa"
    packed = attention == "packed"
    if trainer.compile == "on" and not packed:
        raise ConfigError(
            f"trainer.compile = 'on' needs packed rows, got trainer.attention = {trainer.attention!r} for {dtype} on {device.type}",
            hint="each row length would be compiled anew; set trainer.attention = 'packed', or trainer.compile = 'auto'",
            key="trainer.compile",
        )
    free = trainer.compile == "auto" and trainer.tensor == 1
    compiled = trainer.compile == "on" or (free and packed and cuda and config.run.numerics != "bitwise")
    return Kernels(
        attention=attention,
        free_attention=trainer.attention == "auto",
        compile=compiled,
        free_compile=free,
        kept_layers=_kept_layers(trainer.activations, cuda=cuda),
    )


def _kept_layers(activations: int | str, *, cuda: bool) -> int | Literal["auto"] | None:
    if activations == "auto":
        return "auto" if cuda else None
    return activations if isinstance(activations, int) else None


def never_eager_again() -> None:
    """Let torch.compile make code for every shape that comes, and fail rather than run one without: it would do so in silence.

    All layers share one limit. A row length takes up to four shapes: trained, scored, a frozen model's, and in float32.
    """
    settings: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    settings.recompile_limit, settings.accumulated_recompile_limit = 256, 1024
    settings.fail_on_recompile_limit_hit = True
