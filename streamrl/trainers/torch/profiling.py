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
        name = f"v{number:08d}-rank{self._rank}"
        trace, history = self._directory / f"{name}.json.gz", self._directory / f"{name}.pickle"
        profiler: torch.profiler.profile | None = None
        remembers = False
        try:
            with _costs_a_line(history):
                remembers = self._cuda and _remember()
            with _costs_a_line(trace):
                profiler = _started(cuda=self._cuda)
            yield
        finally:
            try:
                if profiler is not None:
                    with _costs_a_line(trace):
                        profiler.stop()
                        _write(trace, profiler.export_chrome_trace)
                if remembers:
                    with _costs_a_line(history):
                        _write(history, torch.cuda.memory._dump_snapshot)  # pyright: ignore[reportPrivateUsage]
            finally:
                if self._cuda:
                    with _costs_a_line(history):
                        torch.cuda.memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]


def _remember() -> bool:
    """Begin the history of the GPU's memory."""
    torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)  # pyright: ignore[reportPrivateUsage]
    return True


def _started(*, cuda: bool) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    profiler.start()
    return profiler


@contextmanager
def _costs_a_line(path: Path) -> Generator[None]:
    """What goes wrong with a file of the profile is said, and is no error of the step."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # the profiler's own are RuntimeErrors
        logger.warning("event=profile_lost path=%s error=%s", path, error)


def _write(path: Path, export: Callable[[str], object]) -> None:
    """Whole or not at all; raises what `export` does."""
    half = path.with_name(f".half-{path.name}")  # the profiler packs by the end of the name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        export(str(half))
        os.replace(half, path)
    except BaseException:
        with suppress(OSError):
            half.unlink()
        raise
    logger.info("event=profiled path=%s bytes=%d", path, path.stat().st_size)
