"""Directories of runs, as they are before anything has run in them, and the rows of metrics that lie there."""

from pathlib import Path
from typing import Any

from streamrl.config.tree import Config, RunConfig
from streamrl.monitor.metrics_file import decoded, files
from streamrl.monitor.series import Row
from streamrl.runtime.rundir import RunDir


def bare_run(path: Path) -> RunDir:
    """Make the folders of a run without a configuration."""
    run = RunDir(path)
    run.create()
    return run


def named_run(path: Path, **sections: Any) -> RunDir:
    """Make a run whose configuration has these sections and the name of its folder."""
    run = bare_run(path)
    run.write_config(Config(run=RunConfig(name=path.name), **sections))
    return run


def rows_of(run: RunDir, kind: str) -> list[Row]:
    """Read all whole rows of a kind from a run's file of metrics, and those that it has put aside."""
    found = [decoded(line) for path in files(run.metrics) for line in path.read_bytes().splitlines()]
    return [row for row in found if row is not None and row.kind == kind]
