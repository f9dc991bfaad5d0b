"""What a weight benchmark is asked to do: a model, a load, and windows of steady decoding and of updates, alternating."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import msgspec

from benchmarks.shapes import Shape, num_elements, shape_of
from streamrl.config.engines import SglangConfig
from streamrl.errors import ConfigError

LARGE = 20e9
"""Parameters of which a GPU of 141 GB holds two copies in 16 bits, and not three."""


class Mode(StrEnum):
    """What changes the weights in a window."""

    STEADY = "steady"
    FLIP = "flip"
    """Ours: staged as fast as the link goes, committed by a flip of pointers."""
    PACED = "paced"
    """Ours: staged in paced chunks, the product's default."""
    COPY = "copy"
    """Ours: staged, committed by a copy into the serving buffer (second mode, for what cannot flip)."""
    TENSOR = "tensor"
    """SGLang's own: pause in_place, update_weights_from_tensor (CUDA IPC), continue."""
    DISTRIBUTED = "distributed"
    """SGLang's own: pause in_place, update_weights_from_distributed (NCCL; flattened buckets), continue."""
    DISK = "disk"
    """SGLang's own: pause in_place, update_weights_from_disk, continue."""


OURS = frozenset({Mode.FLIP, Mode.PACED, Mode.COPY})
STOCK = frozenset({Mode.TENSOR, Mode.DISTRIBUTED, Mode.DISK})


class Window(msgspec.Struct, frozen=True):
    """A stretch of time in which one thing happens. Written `mode:seconds` or `mode:seconds/every`, seconds of time each."""

    mode: Mode
    seconds: float
    every_s: float = 0.0
    """Seconds from the start of one update to the start of the next."""

    @property
    def title(self) -> str:
        """`paced, 1 s`: the mode and the time between updates."""
        return self.mode if self.mode is Mode.STEADY else f"{self.mode}, {self.every_s:g} s"


_WINDOW = re.compile(r"(?P<mode>[a-z]+):(?P<seconds>[0-9.]+)(/(?P<every>[0-9.]+))?\Z")

FULL = (
    "steady:10,paced:20/1,steady:10,flip:20/1,steady:10,paced:30/10,steady:10,paced:20/1,steady:10,"
    "copy:12/1,steady:8,tensor:12/1,steady:8,disk:16/8,steady:6"
)
"""About 200 seconds; stock windows last, for one of them has been seen to end a server."""
SHORT = "steady:8,paced:12/1,steady:8,flip:12/1,steady:8,tensor:8/1,steady:6"
SMOKE = "steady:0.5,paced:1.5/0.5,steady:0.5,flip:1/0.5,steady:0.5"
PLANS = {"full": FULL, "short": SHORT, "smoke": SMOKE}


def parse_plan(text: str) -> tuple[Window, ...]:
    """Windows of a plan: one of the names in PLANS, or windows separated by commas.

    Raises:
        ConfigError: a window that is not written as said, or update windows that have no steady window on both sides.
    """
    windows = tuple(_window(part.strip()) for part in PLANS.get(text, text).split(","))
    for before, window, after in zip((None, *windows), windows, (*windows[1:], None), strict=False):
        beside = (before, after)
        if window.mode is not Mode.STEADY and any(other is None or other.mode is not Mode.STEADY for other in beside):
            raise ConfigError(
                f"window {window.title!r}: expected a steady window before and after it",
                hint="update windows are compared with the steady windows beside them, for example steady:5,flip:10/1,steady:5",
                alone=window.title,
            )
    return windows


def _window(text: str) -> Window:
    match = _WINDOW.match(text)
    modes = ", ".join(Mode)
    if match is None or match["mode"] not in set(Mode):
        raise ConfigError(f"expected a window like flip:10/1 with a mode out of {modes}, got {text!r}", window=text)
    window = Window(Mode(match["mode"]), float(match["seconds"]), float(match["every"] or 0.0))
    if window.seconds <= 0 or (window.mode is not Mode.STEADY) != (window.every_s > 0):
        raise ConfigError(f"window {text!r}: expected seconds above 0, and /SECONDS between updates where there are updates", seconds=text)
    return window


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """As given; 0 and the empty string stand for the default, which `resolve` puts in."""

    shape: str = "tiny"
    plan: str = ""
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
        raise ConfigError(
            f"shape {options.shape}: expected {tensor_parallel} GPUs for the engine, got {num_gpus}",
            expected_gpus=tensor_parallel,
            gpus=num_gpus,
        )
    if cpu and options.model.dtype != "float32":
        raise ConfigError(
            f"shape {options.shape}: expected a GPU, got none", hint="without a GPU use --shape tiny", expected_gpus=1, gpus=num_gpus
        )
    devices = options.trainer_device.split(",")
    parts = len(devices)
    twice = [device for device in devices if device != "cpu" and devices.count(device) > 1]
    if twice:
        raise ConfigError(
            f"expected each of the trainer's devices once, got {options.trainer_device}",
            hint="two parts on one GPU are one part: leave one out",
            trainer_device=options.trainer_device,
        )
    if not cpu and num_gpus <= tensor_parallel and parts == 1 and num_elements(options.model) > LARGE:
        raise ConfigError(
            f"shape {options.shape}: expected a GPU for the trainer's weights beside the engine's {tensor_parallel}, got {num_gpus} in all",
            hint="weights and a snapshot of them do not fit beside the engine's two sets; cut they do: --trainer-device cuda:0,cuda:1",
            expected_gpus=tensor_parallel + 1,
            gpus=num_gpus,
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
        raise ConfigError(
            f"expected at most as many probes as streams, got {filled.probes} of {filled.streams}",
            probes=filled.probes,
            streams=filled.streams,
        )
    alone = [window.title for window in filled.windows if window.mode in STOCK]
    if parts > 1 and alone:
        raise ConfigError(
            f"window {alone[0]!r}: expected the trainer's weights on one device, got {filled.trainer_device}",
            hint="SGLang's own ways take whole weights: leave their windows out",
            alone=alone[0],
        )
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
            trainer_device=options.trainer_device,
        )
