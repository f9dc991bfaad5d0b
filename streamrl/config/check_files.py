"""Checks that the files that a configuration names are there, and that its run may have its name."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from streamrl.config.bounds import refuse
from streamrl.config.bridges import bridges, brings_tasks
from streamrl.config.check_sampling import check_grammars
from streamrl.config.metrics import check_sinks
from streamrl.config.paths import DATASETS, DIRECTORIES, FILES, FUNCTIONS, file_of, parse_dataset
from streamrl.config.tree import Config, RunConfig
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import turn_sampling

_LONGEST_NAME = 128
"""Names become folders and subjects, which may be 255 bytes long with what stands around a name."""


def check_files(config: Config) -> None:
    """Raise ConfigError for the first file, directory or sink's package that is named but not there, and see `check_new_name`."""
    check_new_name(config.run)
    check_sinks(config.metrics)
    _check_sources(config)
    check_grammars(config, config.sampling, "sampling")
    check_grammars(config, config.evaluation.sampling, "evaluation.sampling")
    _check_sets(config)
    for key in (key for bridge in bridges() for key in bridge.function_lists):
        for index, function in enumerate(field(config, key)):
            if file := file_of(function):
                _check_there(f"{key}[{index}]", file)
    for key in (*DATASETS, *DIRECTORIES, *FILES, *FUNCTIONS):
        text: str = field(config, key)
        if key in DATASETS:
            text = parse_dataset(text).path
        elif key in FUNCTIONS:
            text = file_of(text)
        if not text or (key == "data.train" and brings_tasks(config.producer.function)):  # it is written when the run starts
            continue
        # Of files for each role the operator's is looked for here, the others when the run starts.
        _check_there(key, text.replace("{role}", "operator") if key in FILES else text, directory=key in DIRECTORIES, rows=key in DATASETS)


def _check_sets(config: Config) -> None:
    for one in config.evaluation.sets:
        place = f"evaluation.sets[{one.name}]"
        _check_there(f"{place}.path", parse_dataset(one.path).path, rows=True)
        for key, function in (("function", one.function), ("reward.kind", one.reward.kind)):
            if file := file_of(function):
                _check_there(f"{place}.{key}", file)
        check_grammars(config, turn_sampling(config.evaluation.sampling, one.sampling), f"{place}.sampling")


def _check_there(key: str, text: str, *, directory: bool = False, rows: bool = False) -> None:
    path, kind = Path(text), "a directory" if directory else "a file"
    if path.is_dir() if directory else path.is_file() or (rows and (path.is_dir() or glob.has_magic(text))):
        return
    there = ("a directory" if path.is_dir() else "something else") if path.exists() else f"no such {kind.split()[1]}"
    relative = "relative paths in the TOML file are relative to its folder, those of --set to the working directory"
    gguf = directory and path.is_file() and path.suffix == ".gguf"
    raise ConfigError(
        f"expected {key} to name {kind}, got {'a GGUF file' if gguf else there}: {path}",
        hint=f"`streamrl convert {path} DIR` writes a model directory from it" if gguf else relative,
        key=key,
        path=str(path),
    )


def _check_sources(config: Config) -> None:
    for one in config.data.sources:
        path = Path(parse_dataset(one.train).path)
        refuse(
            not path.exists() and not glob.has_magic(str(path)),
            f"expected the rows of source {one.name!r}, got no such file: {path}",
            hint="relative paths in the TOML file are relative to its folder",
            key="data.sources",
        )


def check_new_name(run: RunConfig) -> None:
    """Raise ConfigError for too long a name of a run that has no directory yet; those that earlier versions made may have longer ones."""
    refuse(
        len(run.name) > _LONGEST_NAME and not os.path.lexists(Path(run.dir) / run.name),
        f"a run name may hold letters, digits, '_' and '-', at most {_LONGEST_NAME} of them, got {run.name!r}",
        hint="choose a shorter one",
        key="run.name",
    )


def field(config: Config, key: str) -> Any:
    """The value of a dotted key, such as `tasks.batch_tasks`."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
