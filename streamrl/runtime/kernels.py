"""Where the kernels that libraries compile for this machine are kept, so that the next run does not compile them again.

Each library keeps versions, chips and options apart by names of its own within its folder; left alone, one puts its files into the home
directory, another into a folder for temporary files that a restart of the machine empties.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from streamrl.config.tree import Config

logger = logging.getLogger(__name__)

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "cuda",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "TILELANG_CACHE_DIR": "tilelang",
        "SGLANG_CACHE_DIR": "sglang",
        "SGLANG_DG_CACHE_DIR": "deep_gemm",
    }
)
"""The variable that names a library's folder, and what it is called here. TORCH_EXTENSIONS_DIR is not among them: torch's own folder, in
the user's cache too, keeps versions of Python and CUDA apart, and one that is named does not."""
COMPILING = ("trainer", "engine")
"""Kinds of worker that compile kernels."""
_GPUS = Path("/proc/driver/nvidia/gpus")


def kernel_folders(config: Config, kind: str, surroundings: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that have the libraries of a worker keep their kernels in one folder, which is made.

    Args:
        config: of the run: `run.kernels`.
        kind: of the worker; none for those that compile nothing.
        surroundings: its environment: a variable that is set there stays as it is.

    Returns:
        None where the folder cannot be written: each library then does as it always does.
    """
    if kind not in COMPILING:
        return {}
    place = kernels_of(config.run.kernels, surroundings) / key_of(gpu_models(), torch_version())
    with suppress(OSError):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(place, os.W_OK | os.X_OK):
        logger.warning("event=kernels_not_kept path=%s", place)
        return {}
    return {name: str(place / folder) for name, folder in VARIABLES.items() if name not in surroundings}


def kernels_of(option: str, surroundings: Mapping[str, str]) -> Path:
    """The folder of all kernels of this user: `option`, or one within XDG_CACHE_HOME."""
    if option:
        return Path(option).expanduser().absolute()
    cache = surroundings.get("XDG_CACHE_HOME", "")
    base = Path(cache) if cache.startswith("/") else Path(surroundings.get("HOME") or Path.home()) / ".cache"
    return base / "streamrl" / "kernels"


def key_of(gpus: Iterable[str], torch: str) -> str:
    """The name of the folder for a machine: its models of GPU, `cpu` without any, and the version of torch."""
    words = "+".join(sorted(set(gpus))) or "cpu"
    return re.sub(r"[^A-Za-z0-9.+]+", "-", f"{words} torch {torch or 'none'}")


def gpu_models(folder: Path = _GPUS) -> list[str]:
    """Models of the NVIDIA GPUs of this machine, as its driver names them; asks no GPU."""
    found: list[str] = []
    with suppress(OSError):
        for path in sorted(folder.glob("*/information")):
            lines = [line.partition(":") for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
            found += [value.strip() for name, _, value in lines if name.strip() == "Model"]
    return found


def torch_version() -> str:
    """Version of torch in this interpreter, which is not imported for it; empty: there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
