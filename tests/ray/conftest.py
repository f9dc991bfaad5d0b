"""A run that Ray can place: rows, a configuration with the table, and a way to start programs beside them."""

from pathlib import Path

import pytest

from streamrl.runtime.rundir import RunDir
from tests.support.digits import TABLE, write_digits

TOML = f"""{TABLE}
[supervise]
backoff_s = 0.1
[ray.trainer]
cpus = 0.5
[ray.engine]
cpus = 0.5
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_digits(tmp_path, TOML)
    return tmp_path


@pytest.fixture
def run(place: Path) -> RunDir:
    return RunDir(place / "runs" / "digits")
