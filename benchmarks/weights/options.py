"""What a weight benchmark is asked to do."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.shapes import Shape, num_elements, shape_of
from benchmarks.weights.plan import Mode, Window, parse_plan
from streamrl.config.engines import SglangConfig
from streamrl.errors import ConfigError

LARGE = 20e9
"""Parameters of which a GPU of 141 GB holds two copies in 16 bits, and not three."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """As given; 0 and the empty string stand for the default, which `resolve` puts in."""

    shape: str
    plan: str
    out: str
    streams: int = 0
    probes: int = 0
    mean_tokens: int = 0
    tensor_parallel: int = 0
    trainer_device: str = ""
    max_gap_ms: float = SglangConfig().max_gap_ms
    """Of the paced windows; 0: no bound."""
    warm_s: float = 0.0
    default_graphs: bool = False
    python: str = ""
    flags: dict[str, Any] = {}

    @property
    def model(self) -> Shape:
        """The shape by its name."""
        return shape_of(self.shape)

    @property
    def windows(self) -> tuple[Window, ...]:
        """The plan's windows."""
        return parse_plan(self.plan)


def resolve(options: Options, *, num_gpus: int) -> Options:
    """Put in the defaults for this machine.

    Raises:
        ConfigError: the shape, the plan or a number cannot be had here.
    """
    cpu = num_gpus == 0
    tensor_parallel = options.tensor_parallel or (1 if cpu else options.model.tensor_parallel)
    if not cpu and tensor_parallel > num_gpus:
        raise ConfigError(f"shape {options.shape}: expected {tensor_parallel} GPUs for the engine, got {num_gpus}")
    if cpu and options.model.dtype != "float32":
        raise ConfigError(f"shape {options.shape}: expected a GPU, got none", hint="without a GPU use --shape tiny")
    if not cpu and num_gpus <= tensor_parallel and num_elements(options.model) > LARGE:
        raise ConfigError(
            f"shape {options.shape}: expected a GPU for the trainer's weights beside the engine's {tensor_parallel}, got {num_gpus} in all",
            hint="weights and a snapshot of them do not fit beside the engine's two sets",
        )
    last = "cpu" if cpu else f"cuda:{min(tensor_parallel, num_gpus - 1)}"
    filled = msgspec.structs.replace(
        options,
        plan=options.plan or ("smoke" if cpu else "full"),
        streams=options.streams or (8 if cpu else 128),
        probes=options.probes or (2 if cpu else 4),
        mean_tokens=options.mean_tokens or (64 if cpu else 1500),
        tensor_parallel=tensor_parallel,
        trainer_device=options.trainer_device or last,
        warm_s=options.warm_s or (1.0 if cpu else 15.0),
    )
    if not 0 <= filled.probes <= filled.streams:
        raise ConfigError(f"expected at most as many probes as streams, got {filled.probes} of {filled.streams}")
    if not filled.windows:
        raise ConfigError("expected at least one window, got an empty plan")
    if not cpu and any(window.mode is Mode.DISTRIBUTED for window in filled.windows):
        _check_apart(filled)
    return filled


def _check_apart(options: Options) -> None:
    """NCCL has one rank on a GPU; the engine's are on the first ones."""
    kind, _, index = options.trainer_device.partition(":")
    if kind != "cuda" or int(index or 0) < options.tensor_parallel:
        engine = ", ".join(f"cuda:{gpu}" for gpu in range(options.tensor_parallel))
        raise ConfigError(
            f"a distributed window: expected the trainer's weights on another GPU than the engine ({engine}), got {options.trainer_device}",
            hint="leave the window out, or give the bench one more GPU",
        )
