from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.config.files import write_private
from streamrl.config.tree import Config, ModelConfig, RunConfig
from streamrl.errors import ConfigError, LaunchError, SchemaError
from streamrl.runtime.rundir import RunDir, known_runs
from streamrl.schemas.versions import Version
from tests.support.errors import raises


def made(base: Path, name: str) -> RunDir:
    run = RunDir(base / name)
    run.create()
    run.write_config(Config(run=RunConfig(name=name)))
    return run


def test_a_run_directory_is_closed_to_others_and_its_configuration_comes_back(tmp_path: Path) -> None:
    run = made(tmp_path, "first")
    run.create()
    for path in (run.path, run.logs, run.checkpoints, run.hf, run.bus_store):
        assert path.stat().st_mode & 0o777 == 0o700
    assert run.config_path.stat().st_mode & 0o777 == 0o600
    assert made(tmp_path, "first").load_config() == Config(run=RunConfig(name="first"))


def test_a_run_is_found_by_name_or_the_known_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "runs", "first")
    monkeypatch.chdir(tmp_path)
    assert RunDir.find("first").path == run.path
    assert RunDir.find("runs/first").path == run.path
    assert RunDir.find(str(run.path)).path == run.path
    with raises(ConfigError, run="frist") as caught:
        RunDir.find("frist", base=tmp_path)
    assert "there are no runs" in caught.value.hint
    made(tmp_path, "first")
    with pytest.raises(ConfigError) as caught:
        RunDir.find("frist", base=tmp_path)
    assert caught.value.hint.endswith(": first")


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    for age, name in ((30, "old"), (10, "new"), (20, "middle")):
        run = made(tmp_path, name)
        os.utime(run.config_path, (1000 - age, 1000 - age))
    (tmp_path / "no_run").mkdir()
    assert [run.name for run in known_runs(tmp_path)] == ["new", "middle", "old"]


def test_policies_and_exports_have_their_places(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "first")
    assert run.policy_dir(Config()) == run.model_dir
    assert run.policy_dir(Config(model=ModelConfig(path="/models/x"))) == Path("/models/x")
    run = RunDir(tmp_path)
    assert [run.export_path(Version(epoch, 20)).name for epoch in (0, 1)] == ["v00000020", "v00000020-e1"]
    write_private(tmp_path / "x", b"one")
    write_private(tmp_path / "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_is_no_run_or_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(LaunchError, path=str(tmp_path / "file" / "first")) as caught:
        RunDir(tmp_path / "file" / "first").create()
    assert "run.dir" in caught.value.hint
    with pytest.raises(SchemaError):
        RunDir(tmp_path / "a b").create()
    with raises(ConfigError, path=str(tmp_path / "config.json")):
        RunDir(tmp_path).load_config()
