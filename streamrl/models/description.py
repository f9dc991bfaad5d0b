"""The files of a Hugging Face directory beside the weights: configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

from streamrl.errors import ConfigError

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Ends of names of files that are not copied, for another directory has its own weights."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json; raises ConfigError where it cannot be read or is no object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="is it a model directory?", path=str(path)) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected an object, got {type(config).__name__}", hint="is it a model directory?", path=str(path))
    return cast("dict[str, Any]", config)


def copy_description(source: Path, directory: Path, dtype: str = "") -> None:
    """Copy all files of a model directory but its weights, and those that are there already.

    Args:
        source: a model directory.
        directory: where they go.
        dtype: type of the weights, which config.json says in the copy; empty: as it does now.
    """
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and not (directory / file.name).exists():
            shutil.copyfile(file, directory / file.name)
    if dtype:
        config = read_config(directory)
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        (directory / "config.json").write_text(json.dumps({**config, key: dtype}, indent=2) + "\n", encoding="utf-8")
