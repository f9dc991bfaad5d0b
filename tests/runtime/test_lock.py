from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.config.tree import Config, RunConfig
from streamrl.errors import LaunchError
from streamrl.launch.down import stop_run
from streamrl.runtime.lock import holder, lock_run
from streamrl.runtime.rundir import RunDir
from streamrl.weights.factory import weights_directory


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "demo")
    directory.create()
    return directory


def test_a_run_has_one_holder_at_a_time(run: RunDir) -> None:
    assert holder(run) is None
    with lock_run(run):
        assert holder(run) == os.getpid()
        with pytest.raises(LaunchError, match=f"process {os.getpid()}") as caught, lock_run(run):
            pass
        assert caught.value.values["pid"] == os.getpid()
    assert holder(run) is None
    with lock_run(run):
        pass


def test_a_lock_left_by_a_dead_process_is_free(run: RunDir) -> None:
    run.lock_path.write_text("999999999")
    assert holder(run) is None
    with lock_run(run):
        assert run.lock_path.read_text() == str(os.getpid())


def test_stopping_what_does_not_run_frees_what_a_killed_run_left(run: RunDir) -> None:
    config = Config(run=RunConfig(name="demo"))
    run.write_config(config)
    left = weights_directory(config.weights, "demo", run.path)
    left.mkdir()
    (left / "policy.0-1.abc.weights").write_bytes(b"1234")
    assert not stop_run(run, now=False, timeout_s=0.0)
    assert not left.exists()
    assert not stop_run(run, now=False, timeout_s=0.0)
