"""Whether the files that a configuration names are there, and its run may have its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from streamrl.config.check_sampling import check_grammars
from streamrl.config.environments import VERIFIERS
from streamrl.config.metrics import check_sinks
from streamrl.config.paths import DATASETS, DIRECTORIES, FILES, FUNCTIONS, file_of, parse_dataset
from streamrl.config.tree import Config, RunConfig, refuse
from streamrl.errors import ConfigError

_LONGEST_NAME = 128
"""Names become folders and subjects, which may be 255 bytes long with what stands around a name."""


def check_files(config: Config) -> None:
    """Raise ConfigError for the first file, directory or sink's package that is named but not there, and see `check_new_name`."""
    check_new_name(config.run)
    check_sinks(config.metrics)
    _check_sources(config)
    check_grammars(config, config.sampling, "sampling")
    check_grammars(config, config.evaluation.sampling, "evaluation.sampling")
    for key in (*DATASETS, *DIRECTORIES, *FILES, *FUNCTIONS):
        text: str = field(config, key)
        if key in DATASETS:
            text = parse_dataset(text).path
        elif key in FUNCTIONS:
            text = file_of(text)
        if not text or (key == "data.train" and config.producer.function.startswith(VERIFIERS)):  # it is written when the run starts
            continue
        # Of files for each role the operator's is looked for here, the others when the run starts.
        path, kind = Path(text.replace("{role}", "operator") if key in FILES else text), "a directory" if key in DIRECTORIES else "a file"
        found = path.is_dir() if key in DIRECTORIES else path.is_file() or (key in DATASETS and path.is_dir())
        if not found:
            there = ("a directory" if path.is_dir() else "something else") if path.exists() else f"no such {kind.split()[1]}"
            raise ConfigError(
                f"expected {key} to name {kind}, got {there}: {path}",
                hint="relative paths in the TOML file are relative to its folder, those of --set to the working directory",
                key=key,
                path=str(path),
            )


def _check_sources(config: Config) -> None:
    for one in config.data.sources:
        path = Path(parse_dataset(one.train).path)
        refuse(
            not path.exists(),
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
