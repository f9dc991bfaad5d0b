from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("streamrl", "producers", "consumers", "schemas")


@pytest.mark.process
def test_the_wheel_holds_one_package_with_everything_in_it(tmp_path):
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    code = "import setuptools.build_meta as build; print(build.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "dist" / done.stdout.split()[-1]) as wheel:
        names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"streamrl"}
    sources = {path.relative_to(ROOT) for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    expected = {str(path) if path.parts[0] == "streamrl" else f"streamrl/{path}" for path in sources}
    assert expected - names == set()
    assert "streamrl/py.typed" in names
