from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.config.tree import Config
from streamrl.errors import ConfigError, LaunchError
from streamrl.launch.prepare import check_start
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from tests.support.errors import raises


async def test_no_run_is_trained_in_the_directory_of_a_branch(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "faster")
    run.create()
    (run.path / BRANCH_FILE).write_text("{}")
    with raises(ConfigError, key="run.name", path=str(run.path)):
        await check_start(Config(), run)


async def test_a_run_whose_checkpoints_do_not_fit_the_disk_does_not_start(tmp_path: Path) -> None:
    described = {"num_attention_heads": 1, "hidden_size": 1 << 20, "intermediate_size": 1, "num_hidden_layers": 1, "vocab_size": 1 << 40}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = Config(run=replace(Config().run, dir=str(tmp_path / "runs")))
    with pytest.raises(LaunchError, match="expected room for two checkpoints") as caught:
        await check_start(replace(config, model=replace(config.model, path=str(tmp_path))), RunDir(tmp_path / "runs" / "demo"))
    assert "run.dir" in caught.value.hint
