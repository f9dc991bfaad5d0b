"""The smallest run, with `up` of its own (`tiny_up.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.runtime.rundir import RunDir
from tests.support.programs import Start
from tests.support.tiny import tiny_up, write_tiny


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a run file and four problems."""
    write_tiny(tmp_path)
    return tmp_path


@pytest.fixture
def run(place: Path) -> RunDir:
    return RunDir(place / "runs" / "demo")


@pytest.fixture
def up(place: Path, start: Start) -> Start:
    """Starts `tiny_up.py` in `place`: the mode, then overrides."""
    return tiny_up(start)
