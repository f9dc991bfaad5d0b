"""Removing runs: the folder of each, what it has left in shared memory, and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from streamrl.config.tree import WeightsConfig
from streamrl.errors import ConfigError, LaunchError
from streamrl.monitor.run_state import REMOVING, RunState, read_state, write_state
from streamrl.monitor.runs import describe, parent_of
from streamrl.runtime.bus_server import end_former
from streamrl.runtime.lock import holder, lock_run
from streamrl.runtime.rundir import BRANCH_FILE, RunDir, known_runs
from streamrl.weights.factory import free_weights

_MOST_NAMED = 5


def removable(text: str, *, base: Path | str) -> RunDir:
    """The run called `text` under `base`, or at that path, if its folder may be removed.

    Raises:
        ConfigError: there is no such run, it is a link, or the folder may hold something else than a run.
        LaunchError: the run is up, or its folder cannot be written to.
    """
    run = RunDir.find(text, base=base, begun=True)
    if run.path.is_symlink():
        target = run.path.resolve()
        raise ConfigError(
            f"expected the folder of a run, got {run.path}, which is a link to {target}",
            hint=f"remove the run with `streamrl runs rm {target}`, and then the link",
            path=str(run.path),
        )
    run = RunDir(run.path.resolve())  # `.` and `..` have no name to be known by
    _check_is_run(run)
    if (found := holder(run)) is not None:
        raise LaunchError(
            f"expected a run that is not up, got {run.name!r}, which is {describe(run).state} (process {found.pid or 'not known'})",
            hint=f"stop it with `streamrl down {text}` first",
            run=run.name,
            pid=found.pid,
        )
    for folder in (run.path, run.path.parent):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise LaunchError(
                f"run {run.name!r} cannot be removed: {folder} may not be written to", hint="whose is it? as that user", path=str(folder)
            )
    return run


def _check_is_run(run: RunDir) -> None:
    """A folder with a `config.json` may be a model's; a run's has a lock or is a branch, and what `up` writes down first."""
    names = {entry.name for entry in os.scandir(run.path)}
    config = _json(run.config_path) if run.config_path.name in names else None
    own = isinstance(config, dict) and isinstance(cast("dict[str, Any]", config).get("run"), dict)
    begun = run.lock_path.name in names and (run.credentials.name in names or names <= {run.lock_path.name, run.state_path.name})
    if (own and names & {run.lock_path.name, BRANCH_FILE}) or begun:
        return
    raise ConfigError(
        f"expected the folder of a run, got {run.path}: neither its lock and credentials nor a run's configuration are there",
        hint="if it is one that is damaged, remove it by hand",
        path=str(run.path),
    )


def check_whole(run: RunDir) -> None:
    """Raise LaunchError for a run whose removal has begun and was cut short: some of its files are gone."""
    last = read_state(run)
    if last is not None and last.state == REMOVING:
        raise LaunchError(
            f"expected a run with all of its files, got {run.name!r}, whose removal was cut short",
            hint=f"end it with `streamrl runs rm {run.path}`, or choose another --name",
            run=run.name,
        )


def check_free(runs: Sequence[RunDir]) -> None:
    """Raise ConfigError where another run beside one of these, that is not one of them, is a branch of it or uses its files."""
    gone = {run.path for run in runs}
    for run in runs:
        beside = [other for other in known_runs(run.path.parent) if other.path.resolve() not in gone]
        branches = [other.name for other in beside if parent_of(other) == run.name]
        users = [other.name for other in beside if other.name not in branches and _names_files_of(other, run)]
        said = [*([f"{_listed(branches)}, trained from its log"] if branches else [])]
        said += [f"{_listed(users)}, whose configuration names files of it"] if users else []
        if said:
            raise ConfigError(
                f"expected a run that no other depends on, got {run.name!r}: there is {', and '.join(said)}",
                hint="remove these too, in one command, or pass --force: they stay as they are, but cannot be compared or made again",
                run=run.name,
                dependents=[*branches, *users],
            )


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _names_files_of(other: RunDir, run: RunDir) -> bool:
    """Such as a policy that the run has exported, which another began with."""
    with contextlib.suppress(OSError):
        if run.name.encode() in other.config_path.read_bytes():
            return _has_path_in(_json(other.config_path), run.path)
    return False


def _has_path_in(value: object, folder: Path) -> bool:
    if isinstance(value, dict):
        return any(_has_path_in(each, folder) for each in cast("dict[str, object]", value).values())
    if isinstance(value, list):
        return any(_has_path_in(each, folder) for each in cast("list[object]", value))
    if not isinstance(value, str) or "\0" in value or not value.startswith("/"):
        return False
    with contextlib.suppress(OSError, RuntimeError):
        return Path(value).resolve().is_relative_to(folder)
    return False


def _json(path: Path) -> object:
    """A file's content; None where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


def remove_run(run: RunDir) -> str:
    """Remove a run that `removable` has found; returns what is left of it elsewhere, in words, or an empty text.

    Credentials, configuration and lock go last: a run whose removal was cut short is still known, as `removing`, and can be removed again.

    Raises:
        LaunchError: it was started meanwhile, or a file could not be removed; then the rest of it is still there.
    """
    left = ""
    try:
        with lock_run(run):
            end_former(run)
            with contextlib.suppress(ConfigError):  # of another version, or damaged: then shared memory stays until the next boot
                config = run.load_config() if run.exists else None
                free_weights(WeightsConfig() if config is None else config.weights, run.name, run.path)
                left = "" if config is None or not config.bus.url else "its streams on the cluster of bus.url stay"
            write_state(run, RunState(state=REMOVING))
            last = (run.state_path, run.config_path, run.lock_path)
            for entry in sorted(os.scandir(run.path), key=lambda entry: entry.name == run.credentials.name):
                if entry.name in {path.name for path in last}:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
            for path in last:
                path.unlink(missing_ok=True)
            run.path.rmdir()
    except OSError as error:
        raise LaunchError(
            f"run {run.name!r} in {run.path.parent} could not be removed as a whole: {error.filename}: {error.strerror}",
            hint="mend that, and repeat the command: what is left of the run is still listed",
            run=run.name,
            path=str(error.filename),
        ) from error
    return left
