"""Whether megatron-core is there, and whether it can build a model, from descriptions alone: before anything starts, and without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.models.megatron.names import Architecture, Place, architecture, check_mesh

LOWEST, BELOW = (0, 16), (0, 20)
"""Versions of megatron-core that are known to have what is used here."""
ROPES = ("default", "linear", "llama3")
"""Types of rotary embeddings whose frequencies do not depend on the row, and which scale nothing else."""
_INSTALL = "pip install 'streamrl[megatron]' (megatron-core >= 0.16, < 0.20: 0.16 for Python 3.11, later ones need 3.12)"
_TAKEN_FOR_GRANTED = ("einops", "psutil")


def check_installed() -> str:
    """Version of megatron-core; raises ConfigError where it, or what it imports without asking for it, is missing or out of range."""
    try:
        found = version("megatron-core")
    except PackageNotFoundError as error:
        raise ConfigError(
            "trainer.backend = 'megatron' needs megatron-core, which is not installed", hint=_INSTALL, key="trainer.backend"
        ) from error
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if not LOWEST <= numbers < BELOW:
        raise ConfigError(
            f"trainer.backend = 'megatron' needs megatron-core >= 0.16 and < 0.20, got {found}",
            hint=_INSTALL,
            key="trainer.backend",
            got=found,
        )
    if missing := [name for name in _TAKEN_FOR_GRANTED if find_spec(name) is None]:
        raise ConfigError(
            f"megatron-core {found} imports {' and '.join(missing)}, which it does not name and which is not installed",
            hint=_INSTALL,
            key="trainer.backend",
            missing=missing,
        )
    return found


def read_architecture(model_dir: Path, tensors: int, experts: int = 1, stages: int = 1) -> tuple[dict[str, Any], Architecture]:
    """config.json of a model that this trainer can build on a mesh of so many tensor or expert ranks and stages; raises ConfigError."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no model in {model_dir}: {error}", hint="is model.path a Hugging Face directory?", path=str(model_dir)
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path}: expected a JSON object, got {type(config).__name__}",
            hint="is model.path a Hugging Face directory?",
            path=str(model_dir),
        )
    return config, buildable(config, str(path), tensors, experts, stages)


def buildable(config: Mapping[str, Any], where: str, tensors: int, experts: int = 1, stages: int = 1) -> Architecture:
    """Of a config.json's object.

    Args:
        config: the object.
        where: its path, for errors.
        tensors: ranks that each matrix is cut for.
        experts: ranks that experts are divided over.
        stages: that the layers are divided into.

    Raises:
        ConfigError: an architecture, or a variant of one, that is not built here, or a mesh that does not divide it.
    """
    arch = architecture(config, where)
    if config.get("use_sliding_window"):
        raise ConfigError(
            f"{where}: expected full attention, got use_sliding_window = true: trainer.backend = 'megatron' cannot train it",
            hint="set trainer.backend = 'torch'",
            key="trainer.backend",
            path=where,
        )
    if arch.experts and tensors > 1:
        raise ConfigError(
            f"{where}: trainer.tensor = {tensors} cuts no mixture of experts: each of its experts stays whole",
            hint="set trainer.tensor = 1, and trainer.experts to the parts that the experts are divided into",
            key="trainer.tensor",
            path=where,
        )
    if experts > 1 and not arch.experts:
        raise ConfigError(
            f"trainer.experts = {experts} divides a mixture of experts, and {where} is of a dense model",
            hint="leave trainer.experts out",
            key="trainer.experts",
            path=where,
        )
    if arch.experts and stages > 1:
        raise ConfigError(
            f"{where}: trainer.pipeline = {stages} cuts no mixture of experts",
            hint="set trainer.pipeline = 1, and trainer.experts to the parts that the experts are divided into",
            key="trainer.pipeline",
            path=where,
        )
    check_mesh(arch, Place(tensors=tensors, expert_parts=experts, stages=stages))
    if arch.vocabulary <= (tensors - 1) * -(-arch.vocabulary // tensors):
        raise ConfigError(
            f"trainer.tensor = {tensors}: a vocabulary of {arch.vocabulary} leaves the last rank without a row",
            hint="use fewer tensor ranks",
            key="trainer.tensor",
        )
    kind = _rope(config)
    if kind not in ROPES:
        raise ConfigError(
            f"{where}: expected rotary embeddings of type {', '.join(ROPES)}, got {kind}: trainer.backend = 'megatron' cannot train it",
            hint="the backend `torch` trains what transformers can",
            path=where,
            got=kind,
        )
    return arch


def _rope(config: Mapping[str, Any]) -> str:
    """Type of the rotary embeddings; transformers up to 4 wrote `rope_scaling`, which is null where nothing is scaled, and `type`."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(told, Mapping):
        return repr(told)
    if any(isinstance(value, Mapping) for value in told.values()):
        return "one for each kind of layer"
    return str(told.get("rope_type") or told.get("type") or "default")
