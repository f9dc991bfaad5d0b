"""Profiles of single training steps: a Chrome trace, and on a GPU the history of its memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_MEMORY_EVENTS = 1_000_000
"""Allocations and releases that are kept with their stacks; of a longer step the newest."""


class StepProfiler:
    """Writes what the steps to some versions did, each to files of its own, whole or not at all.

    `v00000007-rank0.json.gz` opens in Perfetto and chrome://tracing, `v00000007-rank0.pickle` at pytorch.org/memory_viz. A profiled step
    takes longer and gives the same digits. What cannot be written costs a line in the log, never the step; one that fails leaves its files.

    Args:
        directory: made when the first file is written.
        versions: numbers of the versions whose making is profiled.
        device: that the trainer computes on.
        rank: of the trainer.
    """

    def __init__(self, directory: Path, versions: Sequence[int], device: torch.device, *, rank: int) -> None:
        self._directory = directory
        self._versions = frozenset(versions)
        self._cuda = device.type == "cuda"
        self._rank = rank

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """While entered, the step that makes version `number`; nothing is done for a version that was not asked for."""
        if number not in self._versions:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)  # pyright: ignore[reportPrivateUsage]
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        try:
            yield
        finally:
            profiler.stop()
            name = f"v{number:08d}-rank{self._rank}"
            self._write(f"{name}.json.gz", profiler.export_chrome_trace)
            if self._cuda:
                self._write(f"{name}.pickle", torch.cuda.memory._dump_snapshot)  # pyright: ignore[reportPrivateUsage]
                torch.cuda.memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]

    def _write(self, name: str, export: Callable[[str], object]) -> None:
        path = self._directory / name
        half = path.with_name(f".half-{name}")  # the profiler packs by the end of the name
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            export(str(half))
            os.replace(half, path)
        except (OSError, RuntimeError) as error:  # the profiler's own are RuntimeErrors
            with suppress(OSError):
                half.unlink()
            logger.warning("event=profile_lost path=%s error=%s", path, error)
        else:
            logger.info("event=profiled path=%s bytes=%d", path, path.stat().st_size)
