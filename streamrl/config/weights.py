"""The section `weights` and its rule."""

from __future__ import annotations

from typing import Literal

from streamrl.config.bounds import NonNegativeInt, PositiveInt, Section, refuse


class WeightsConfig(Section, frozen=True, kw_only=True):
    """How versions reach the engines."""

    transport: Literal["shm", "ipc", "bus"] = "shm"
    """`shm`: shared memory of one host. `ipc`: memory of the trainer's GPU, for engines with GPUs of that host; a trainer without one
    takes `shm`. `bus`: blobs on the bus."""
    ring: Literal["auto"] | PositiveInt = "auto"
    """Snapshots that a GPU trainer keeps in device memory, each the size of the parameters; with `ipc` the newest versions to be had.
    `auto`: 1 with `shm`, where a version is on the host long before the next is trained, else 2. Deltas
    take one more."""
    also_on_bus: bool = False
    """Put the bytes on the bus too, for engines that share no memory with the trainer."""
    keep: NonNegativeInt = 4
    """Newest versions whose bytes are kept; 0: all, every one of them published (with shm as files in the run directory)."""
    anchor_every: PositiveInt = 16
    """On the bus: versions from one that is stored whole to the next at most; those between are what changed. 1: all are whole."""

    @property
    def in_shared_memory(self) -> bool:
        """True where the versions that are kept lie in /dev/shm."""
        return self._shm and self.keep > 0

    @property
    def _shm(self) -> bool:
        return self.transport == "shm"

    @property
    def snapshots(self) -> int:
        """The ring's buffers."""
        if self.ring != "auto":
            return self.ring
        return 1 if self._shm and not self.also_on_bus else 2

    @property
    def buffers(self) -> int:
        """Snapshots that a GPU has room for: the ring's, and the version that the next is compared with where changes are published."""
        on_bus = self.transport == "bus" or self.also_on_bus
        return self.snapshots + (on_bus and self.anchor_every > 1)


def check_weights(weights: WeightsConfig) -> None:
    """Raise ConfigError where a transport has no room for what is to be kept."""
    refuse(
        weights.transport == "ipc" and weights.keep == 0,
        "weights.keep = 0 keeps every version, but weights.transport = ipc has room for weights.ring of them",
        hint="set weights.keep to 1 or more, or weights.transport to shm or bus",
        key="weights.keep",
    )
