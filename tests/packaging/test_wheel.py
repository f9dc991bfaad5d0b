import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.pythons import python

ROOT = Path(__file__).parents[2]
FOLDERS = ("streamrl", "producers", "consumers", "schemas")
pytestmark = pytest.mark.process
MEASURED_BESIDE = {"benchmarks", "pickle", "redis", "zmq", "orjson"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a clone, benchmarks and all."""
    tmp_path = tmp_path_factory.mktemp("clone")
    for name in (*FOLDERS, "benchmarks", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    code = "import setuptools.build_meta as build; print(build.build_wheel('dist'))"
    return tmp_path / "dist" / python(tmp_path, "-W", "ignore", "-c", code)[0].split()[-1]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(place)
    return place


def streamrl(place: Path, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `place` with the package below `path`."""
    command, environment = [sys.executable, "-P", "-m", "streamrl", *arguments], {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_holds_one_package_with_everything_in_it(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"streamrl"}
    sources = {path.relative_to(ROOT) for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    expected = {str(path) if path.parts[0] == "streamrl" else f"streamrl/{path}" for path in sources}
    assert expected - names == set()
    assert "streamrl/py.typed" in names
    examples = {f"streamrl/{path.relative_to(ROOT)}" for path in (ROOT / "examples").glob("*/*") if path.is_file()}
    assert len(examples) > 20 and examples - names == set()


def test_an_example_is_copied_out_of_the_wheel_once(installed, tmp_path):
    for name in ("quickstart", "calculator_tool", "gsm8k", "presets", "python_tool", "search", "multi_agent", "openai_agent"):
        done = streamrl(tmp_path, installed, "init", f"mine/{name}", "--example", name)
        assert done.returncode == 0, done.stderr
        expected = {path.name: path.read_bytes() for path in (ROOT / "examples" / name).iterdir() if path.is_file()}
        assert {path.name: path.read_bytes() for path in (tmp_path / "mine" / name).iterdir()} == expected
        assert all(f"  streamrl up mine/{name}/{file}" in done.stdout for file in expected if file.endswith(".toml"))
    (tmp_path / "mine" / "quickstart" / "quickstart.toml").write_text("mine")
    (tmp_path / "mine" / "quickstart" / "README.md").unlink()
    again = streamrl(tmp_path, installed, "init", "mine/quickstart")
    assert (again.returncode, again.stdout) == (1, "") and "quickstart.toml" in again.stderr
    assert (tmp_path / "mine" / "quickstart" / "quickstart.toml").read_text() == "mine"
    assert not (tmp_path / "mine" / "quickstart" / "README.md").exists(), "all or nothing"


def imported(tree: ast.AST) -> set[str]:
    """The top-level packages that a module imports anywhere in it."""
    found = [node.names for node in ast.walk(tree) if isinstance(node, ast.Import)]
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in [*(one.name for names in found for one in names), *named]}


def test_nothing_in_the_wheel_imports_what_only_a_benchmark_needs(wheel):
    with zipfile.ZipFile(wheel) as file:
        modules = {name: ast.parse(file.read(name)) for name in file.namelist() if name.endswith(".py")}
    assert len(modules) > 300 and "msgspec" in set.union(*map(imported, modules.values()))
    found = {name: names for name, tree in modules.items() if (names := imported(tree) & MEASURED_BESIDE)}
    assert found == {"streamrl/models/megatron/metadata.py": {"pickle"}}  # of its own: tests/security/test_source.py


def test_the_verb_says_in_a_wheel_where_the_benchmarks_are(installed):
    for arguments in (["weights", "--help"], ["bus"], []):
        done = streamrl(ROOT, installed, "bench", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"expected streamrl from a clone of its repository, got an installed package in {installed}" in done.stderr
        assert "\nhint: " in done.stderr and "benchmarks/" in done.stderr


def test_the_verb_finds_the_clone_from_any_directory(tmp_path):
    other = tmp_path / "benchmarks"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the benchmarks of another project')")
    size = ["bus", "--samples", "1", "--tokens", "16", "--rounds", "1", "--round-tokens", "16", "--transports", "streamrl"]
    done = streamrl(tmp_path, ROOT, "bench", *size, "--out", "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "table.md").is_file()
