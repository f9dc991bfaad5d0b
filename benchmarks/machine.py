"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware, versions and date, as far as they matter to speed."""

    processor: str
    cores: int
    """That this process may use."""
    python: str
    packages: dict[str, str]
    date: str
    load: float = 0.0
    """Processes that wanted a core in the minute before; a benchmark on a busy machine says so."""


def machine(packages: tuple[str, ...]) -> Machine:
    """This machine, now, with the versions of those packages that are installed."""
    installed = {name: found for name in packages for found in (_version(name),) if found}
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        python=platform.python_version(),
        packages=installed,
        date=datetime.now(UTC).date().isoformat(),
        load=round(os.getloadavg()[0], 1),
    )


def describe(one: Machine) -> str:
    """One line."""
    packages = ", ".join(f"{name} {version}" for name, version in one.packages.items())
    return f"{one.processor}, {one.cores} cores, load before {one.load:g}; Python {one.python}, {packages}; {one.date}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
