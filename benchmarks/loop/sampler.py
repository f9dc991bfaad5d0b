"""Processor time and memory of a tree of processes while it runs, by what its processes are."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from bisect import bisect_right
from pathlib import Path
from types import TracebackType

from benchmarks.processes import cpu_by_process

_EVERY_S = 0.25
_CONTENDERS = {"stream": "supervisor", "pipes": "engine", "trainer-half": "trainer"}
"""What the process of a contender is."""
_LIKE = 64
"""Sizes of memory are taken for one when they differ by less than this part of it."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Sampler:
    """While entered, reads the CPU times of a process and all its descendants a few times a second, all threads.

    A process that has ended counts with what it was last seen to have used, as the kind of process that it was.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._kinds: dict[int, str] = {}
        self._seconds: dict[int, float] = {}
        self._marks: list[tuple[float, dict[str, float]]] = []
        self._bytes: list[tuple[float, dict[str, int]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def between(self, start_s: float, end_s: float) -> dict[str, float]:
        """CPU seconds by kind of process between two Unix times, read off between the samples beside them."""
        low, high = self.until(start_s), self.until(end_s)
        return {name: max(0.0, high[name] - low.get(name, 0.0)) for name in sorted(high)}

    def until(self, time_s: float) -> dict[str, float]:
        """CPU seconds by kind of process up to a Unix time."""
        place = bisect_right(self._marks, time_s, key=lambda mark: mark[0])
        if not 0 < place < len(self._marks):
            return dict(self._marks[min(max(place - 1, 0), len(self._marks) - 1)][1]) if self._marks else {}
        (before_s, before), (after_s, after) = self._marks[place - 1], self._marks[place]
        share = (time_s - before_s) / (after_s - before_s)
        return {name: before.get(name, 0.0) + share * (after[name] - before.get(name, 0.0)) for name in after}

    def most_bytes(self, time_s: float = math.inf) -> dict[str, int]:
        """Resident memory of a kind's processes at once, at its most up to a Unix time; what they share counts in each."""
        most: dict[str, int] = {}
        for found in [resident for at_s, resident in self._bytes if at_s <= time_s]:
            most |= {kind: max(size, most.get(kind, 0)) for kind, size in found.items()}
        return most

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            now_s = time.time()
            seconds, resident = self._look()
            self._marks.append((now_s, seconds))
            self._bytes.append((now_s, resident))

    def _look(self) -> tuple[dict[str, float], dict[str, int]]:
        """CPU seconds so far, and resident memory, by kind of process."""
        resident: dict[str, int] = {}
        looks: dict[int, tuple[int, bytes, int]] = {}
        for pid, seconds in cpu_by_process(self._root).items():
            # A process that is ending has no command line any more; one that has just been forked still has its parent's.
            parent, command, pages = _parent(pid), _read(pid, "cmdline"), _read(pid, "statm").split()
            self._kinds[pid] = _kind(command) or self._kinds.get(pid, "other")
            self._seconds[pid] = max(seconds, self._seconds.get(pid, 0.0))
            looks[pid] = parent, command, int(pages[1]) * _PAGE_BYTES if pages else 0
        for pid, (parent, command, size) in looks.items():
            # Until its own program begins, its memory is its parent's too, and none besides; that may have grown between two looks.
            _, its_command, parents_size = looks.get(parent, (0, b"", 0))
            if command != its_command or abs(size - parents_size) * _LIKE > parents_size:
                resident[self._kinds[pid]] = resident.get(self._kinds[pid], 0) + size
        total: dict[str, float] = {}
        for pid, kind in self._kinds.items():
            total[kind] = total.get(kind, 0.0) + self._seconds[pid]
        return total, resident


def _kind(command: bytes) -> str:
    """Of a command line: `engine` for `python -m streamrl worker engine ...`, `page` for `python -m streamrl page ...`.

    `sink-wandb` for that sink, the program's name for what is not ours; empty where it cannot be told.
    """
    words = command.decode(errors="replace").split("\0")
    if "worker" in words:
        return words[words.index("worker") + 1]
    for first, second, third in zip(words, words[1:], words[2:], strict=False):
        if (first, second) == ("-m", "streamrl"):
            return third
        if second == "streamrl.monitor.sinks":
            return f"sink-{third}"
    contending = [after for word, after in itertools.pairwise(words) if word.endswith("loop.contender")]
    if contending:
        return _CONTENDERS.get(contending[0], "all")
    return Path(words[0]).name


def _parent(pid: int) -> int:
    """The parent of a process; 0 once it is gone."""
    return int(next(iter(_read(pid, "stat").rpartition(b") ")[2].split()[1:]), b"0"))


def _read(pid: int, name: str) -> bytes:
    """A file of /proc; empty once the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
