"""What the system lets a run have: processors, memory, open files, disk, shared memory."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

from streamrl.doctor.findings import Check
from streamrl.system import cores

GIBIBYTE = 1 << 30
_WARN_DISK_BYTES, _MIN_DISK_BYTES = 8 * GIBIBYTE, GIBIBYTE
_MIN_SHM_BYTES = 256 << 20
_WARN_MEMORY_BYTES, _MIN_MEMORY_BYTES = 4 * GIBIBYTE, GIBIBYTE
_MIN_FILES = 1024
"""The nats-server keeps a file or two a stream and one a client open; torch and Arrow map a few hundred."""


def check_cores(control_group: Path = Path("/sys/fs/cgroup")) -> Check:
    """Processors that this process may use: those it is bound to, and the container's quota."""
    usable = float(cores())
    quota = _words(control_group / "cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        usable = min(usable, int(quota[0]) / int(quota[1]))
    found = f"{usable:g} of {os.cpu_count()} processors"
    if usable < 2:
        return Check("cores", "warn", found, "trainer and engine share it and take turns; with two they work side by side")
    return Check("cores", "ok", found)


def check_memory(facts: Path = Path("/proc/meminfo"), control_group: Path = Path("/sys/fs/cgroup")) -> Check:
    """Memory that is free, and the container's limit on it."""
    try:
        available = next(int(line.split()[1]) << 10 for line in facts.read_text().splitlines() if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return Check("memory", "ok", "unknown on this system")
    limit, used = _words(control_group / "memory.max"), _words(control_group / "memory.current")
    if limit and used and limit[0].isdigit():
        available = min(available, int(limit[0]) - int(used[0]))
    found = f"{available / GIBIBYTE:.1f} GB available"
    if available < _MIN_MEMORY_BYTES:
        return Check("memory", "fail", found, "trainer and engine load torch, at about 0.4 GB each; free some")
    if available < _WARN_MEMORY_BYTES:
        return Check("memory", "warn", found, "enough for the quickstart; larger models need some 20 bytes a parameter")
    return Check("memory", "ok", found)


def check_files(limit: int | None = None) -> Check:
    """Files that one process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limit is None else (limit, limit)
    if soft in (resource.RLIM_INFINITY, -1):
        return Check("files", "ok", "no limit on open files")
    found = f"{soft} open files a process"
    if soft < _MIN_FILES:
        top = "unlimited" if hard in (resource.RLIM_INFINITY, -1) else str(hard)
        hint = f"raise it in this shell with ulimit -n {_MIN_FILES}, which goes up to {top}"
        return Check("files", "warn", found, hint)
    return Check("files", "ok", found)


def check_disk(runs_dir: Path) -> Check:
    """Room and rights where runs go."""
    place = runs_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{free / GIBIBYTE:.1f} GB free at {place}"
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check("disk", "fail", f"{place}: {error.strerror}", "choose another place with --set run.dir=DIR")
    if free < _MIN_DISK_BYTES:
        return Check("disk", "fail", found, "free some space, or choose another place with --set run.dir=DIR")
    if free < _WARN_DISK_BYTES:
        return Check("disk", "warn", found, "lower bus.samples_bytes, bus.blobs_bytes and bus.sample_blobs_bytes, or free some space")
    return Check("disk", "ok", found)


def check_shm(place: Path = Path("/dev/shm")) -> Check:
    """Shared memory, over which weights reach the engines of one host."""
    if not place.is_dir():
        return Check("shm", "warn", f"no {place}", 'set weights.transport = "bus"')
    free = shutil.disk_usage(place).free
    found = f"{free / GIBIBYTE:.1f} GB free at {place}"
    if free < _MIN_SHM_BYTES:
        return Check("shm", "warn", found, 'raise it (docker run --shm-size=8g), or set weights.transport = "bus"')
    return Check("shm", "ok", found)


def _words(path: Path) -> list[str]:
    """Words of a small file of the kernel; none where it is not there."""
    try:
        return path.read_text().split()
    except OSError:
        return []
