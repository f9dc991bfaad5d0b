"""The user's code as it is when a run starts: copied for its workers, and looked at for changes while they run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from streamrl.config.code import code_digests, code_files, loss_code, rollout_code
from streamrl.config.code_copies import changed, make_copies, read_index
from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import RunRecord

_NAMED = 3
"""Files that a note names."""


class KeptCode:
    """The code of one start.

    Args:
        run: its directory has the copies.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._copies: dict[Path, Path] = {}

    def keep(self, config: Config, record: RunRecord, loaded: Iterable[Path]) -> str:
        """Copy it; returns why that is not done, or nothing.

        Args:
            config: names it.
            record: has its digests.
            loaded: modules that it was seen to import.

        Raises:
            LaunchError: it was saved while the run was prepared, or there is no room for it.
        """
        named = {**rollout_code(config), **loss_code(config)}
        try:
            why = make_copies(self._run.code, {*code_files(named), *loaded})
        except OSError as error:
            raise LaunchError(f"the user's code cannot be copied to {self._run.code}: {error}", hint="is the disk full?") from error
        self._copies = read_index(self._run.code)
        if changed(self._copies) or (record.code or {}) != code_digests(named):
            raise LaunchError("the user's code was saved while the run was prepared", hint="run `up` again, which takes what is there then")
        return f"the user's code is not kept, a restarted worker takes what is there then: {why}" if why else ""

    def take_changes(self) -> str:
        """Say that files were saved since the start, once for each; empty: none was."""
        found = changed(self._copies)
        for path in found:
            del self._copies[path]
        if not found:
            return ""
        names = ", ".join(str(path) for path in found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
        return f"{names} changed since this start: the run goes on with the code that it was started with; the next `up` takes the new one"
