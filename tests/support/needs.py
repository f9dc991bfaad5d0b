"""Needs are things that a machine may lack, such as a GPU or a redis-server.

A test declares one with `@pytest.mark.needs("redis")`; a test or a fixture may also call `need("redis")`. Where the need is not met, the
test is skipped with the reason. It fails instead if STREAMRL_REQUIRE names the need (`STREAMRL_REQUIRE=sglang,hosts`); `all` names every
need but GPUs, as in CI.
"""

import importlib.util
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from streamrl.errors import LaunchError
from streamrl.sandbox import Sandbox
from streamrl.sandbox.handle import Kind

ROOT = Path(__file__).resolve().parents[2]
SWITCH = "STREAMRL_REQUIRE"


def sglang_python() -> str | None:
    """Find the interpreter of an environment with SGLang: SGLANG_PYTHON, or the one that `make sglang-cpu` makes."""
    return _python_of("SGLANG_PYTHON", ".venv-sglang")


def _python_of(variable: str, venv: str) -> str | None:
    named = os.environ.get(variable)
    python = Path(named) if named else ROOT / venv / "bin" / "python"
    return str(python) if python.exists() else None


def verifiers_python() -> str | None:
    """Find the interpreter of an environment with verifiers: VERIFIERS_PYTHON, or the one that `make verifiers` makes."""
    return _python_of("VERIFIERS_PYTHON", ".venv-verifiers")


def openenv_python() -> str | None:
    """Find the interpreter of an environment with OpenEnv's server: OPENENV_PYTHON, or the one that `make verifiers` makes."""
    return _python_of("OPENENV_PYTHON", ".venv-openenv")


def _no_sglang() -> str:
    return "" if sglang_python() else "no SGLang here: `make sglang-cpu` makes .venv-sglang, or name an interpreter in SGLANG_PYTHON"


def _no_hosts() -> str:
    """Try to make namespaces, cables and a private mount; return why this user may not."""
    missing = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (iproute2, util-linux)"
    trial = f"streamrl-trial-{uuid.uuid4().hex[:6]}"
    made = _said("ip", "netns", "add", trial)
    if made:
        return f"network namespaces cannot be made here, which needs the right CAP_SYS_ADMIN: {made}"
    try:
        said = (
            _said("ip", "-n", trial, "link", "add", "name", "port1", "type", "veth", "peer", "name", "port2")
            or _said("ip", "-n", trial, "link", "add", "name", "br0", "type", "bridge")
            or _said("ip", "netns", "exec", trial, "unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        )
    finally:
        _said("ip", "netns", "del", trial)
    return f"virtual cables, a bridge or a private mount cannot be made here: {said}" if said else ""


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""


def _no_package(*names: str) -> str:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"no Python package {' and '.join(missing)}: the extra `dev` has it" if missing else ""


def chat_templates() -> Path | None:
    """Find the folder of models' own chat templates in the package trl, which is not imported."""
    found = importlib.util.find_spec("trl")
    folders = [Path(place) / "chat_templates" for place in (found.submodule_search_locations or [])] if found else []
    return next((folder for folder in folders if folder.is_dir()), None)


def _no_chat_templates() -> str:
    return "" if chat_templates() else "no package trl with models' chat templates: `make test` installs it"


def _no_redis() -> str:
    server = "" if shutil.which("redis-server") else "no redis-server on PATH: apt install redis-server"
    return server or _no_package("redis", "orjson")


BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _no_browser() -> str:
    return _no_package("playwright") or ("" if browser() else "no Chromium on PATH: apt install chromium-headless-shell")


def _no_gpus(least: int) -> str:
    import torch

    return "" if torch.cuda.device_count() >= least else f"{least} CUDA device{'s' if least > 1 else ''}, got {torch.cuda.device_count()}"


def _no_isolation(kind: Kind) -> str:
    """Run a program with this isolation; return why it cannot be kept apart."""
    sandbox = Sandbox(isolation=kind)
    try:
        sandbox.check()
    except LaunchError as error:
        return error.message
    finally:
        sandbox.close()
    return ""


REASONS: dict[str, Callable[[], str]] = {
    "sglang": cache(_no_sglang),
    "hosts": cache(_no_hosts),
    "redis": cache(_no_redis),
    "browser": cache(_no_browser),
    "zmq": cache(lambda: _no_package("zmq")),
    "ray": cache(lambda: _no_package("ray")),
    "chat templates": cache(_no_chat_templates),
    "namespaces": cache(lambda: _no_isolation("namespaces")),
    "landlock": cache(lambda: _no_isolation("landlock")),
    "ifbench": cache(lambda: _no_package("if_verifiable")),
    "trackio": cache(lambda: _no_package("trackio")),
    "verifiers": lambda: "" if verifiers_python() else "no verifiers here: `make verifiers`, or name an interpreter in VERIFIERS_PYTHON",
    "openenv": lambda: "" if openenv_python() else "no OpenEnv here: `make verifiers`, or name an interpreter in OPENENV_PYTHON",
    "gpu": lambda: _no_gpus(1),
    "two gpus": lambda: _no_gpus(2),
}
"""Each need maps to a function that says why this machine does not meet it, or returns an empty string."""
GPUS = {"gpu", "two gpus"}


def required() -> set[str]:
    named = {name.strip() for name in os.environ.get(SWITCH, "").split(",")} - {""}
    if unknown := named - REASONS.keys() - {"all"}:
        raise pytest.UsageError(f"{SWITCH}: expected all, or some of {', '.join(REASONS)}; got {', '.join(sorted(unknown))}")
    return (named - {"all"}) | (REASONS.keys() - GPUS if "all" in named else set())


def need(name: str) -> None:
    """Skip the calling test if the machine does not meet a need; fail it if the need is required."""
    if reason := REASONS[name]():
        (pytest.fail if name in required() else pytest.skip)(f"needs {name}: {reason}")
