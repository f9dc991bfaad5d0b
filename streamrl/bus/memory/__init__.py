"""The bus in process: the same contract as on JetStream, for tests, simulations and single-process runs. Nothing is durable."""

from __future__ import annotations

from streamrl.bus.memory.bus import MemoryBus

__all__ = ["MemoryBus"]
