"""Where compiled kernels are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.config.tree import Config, RunConfig
from streamrl.runtime.kernels import VARIABLES, gpu_models, kernel_folders, kernels_of, key_of


@pytest.mark.parametrize(
    ("option", "surroundings", "path"),
    [
        ("", {"HOME": "/home/a"}, "/home/a/.cache/streamrl/kernels"),
        ("", {"HOME": "/home/a", "XDG_CACHE_HOME": "/cache"}, "/cache/streamrl/kernels"),
        ("", {"HOME": "/home/a", "XDG_CACHE_HOME": "relative"}, "/home/a/.cache/streamrl/kernels"),
        ("/scratch/k", {"HOME": "/home/a", "XDG_CACHE_HOME": "/cache"}, "/scratch/k"),
    ],
)
def test_kernels_are_in_the_users_cache_unless_another_folder_is_named(option: str, surroundings: dict[str, str], path: str):
    assert kernels_of(option, surroundings) == Path(path)


@pytest.mark.parametrize(
    ("gpus", "torch", "key"),
    [
        ([], "2.13.0+cpu", "cpu-torch-2.13.0+cpu"),
        (["NVIDIA H100 80GB HBM3"] * 2, "2.11.0", "NVIDIA-H100-80GB-HBM3-torch-2.11.0"),
        (["NVIDIA H200", "NVIDIA A100/x"], "", "NVIDIA-A100-x+NVIDIA-H200-torch-none"),
    ],
)
def test_machines_have_folders_of_their_own(gpus: list[str], torch: str, key: str):
    assert key_of(gpus, torch) == key


def test_the_driver_says_which_gpus_there_are(tmp_path: Path):
    for number, model in enumerate(("NVIDIA H100 80GB HBM3", "NVIDIA H200")):
        (tmp_path / f"0000:0{number}").mkdir()
        (tmp_path / f"0000:0{number}" / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t 1\n")
    assert gpu_models(tmp_path) == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert gpu_models(tmp_path / "none") == []


def test_workers_that_compile_are_told_and_what_is_set_stays(tmp_path: Path):
    config = Config(run=RunConfig(kernels=str(tmp_path / "kernels")))
    told = kernel_folders(config, "engine", {"TRITON_CACHE_DIR": "/mine"})
    (place,) = (tmp_path / "kernels").iterdir()
    assert told == {name: str(place / folder) for name, folder in VARIABLES.items() if name != "TRITON_CACHE_DIR"}
    assert place.stat().st_mode & 0o077 == 0
    assert kernel_folders(config, "trainer", {}).keys() == VARIABLES.keys()
    assert kernel_folders(config, "producer", {}) == {}


def test_libraries_do_as_ever_where_nothing_can_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    config = Config(run=RunConfig(kernels=str(tmp_path / "file" / "kernels")))
    assert kernel_folders(config, "engine", dict(os.environ)) == {}
