"""What a benchmark does in which order: windows of steady decoding and windows of updates, alternating."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from streamrl.errors import ConfigError


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
            )
    return windows


def _window(text: str) -> Window:
    match = _WINDOW.match(text)
    modes = ", ".join(Mode)
    if match is None or match["mode"] not in set(Mode):
        raise ConfigError(f"expected a window like flip:10/1 with a mode out of {modes}, got {text!r}")
    window = Window(Mode(match["mode"]), float(match["seconds"]), float(match["every"] or 0.0))
    if window.seconds <= 0 or (window.mode is not Mode.STEADY) != (window.every_s > 0):
        raise ConfigError(f"window {text!r}: expected seconds above 0, and /SECONDS between updates where there are updates")
    return window
