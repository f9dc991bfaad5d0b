from __future__ import annotations

from pathlib import Path

from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from streamrl.launch.prepare import check_start
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from tests.support.errors import raises


async def test_no_run_is_trained_in_the_directory_of_a_branch(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "faster")
    run.create()
    (run.path / BRANCH_FILE).write_text("{}")
    with raises(ConfigError, key="run.name", path=str(run.path)):
        await check_start(Config(), run)
