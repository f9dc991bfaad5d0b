"""What a machine lacks, and what a session leaves behind."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config.tree import WeightsConfig
from streamrl.runtime.rundir import RunDir
from streamrl.weights.factory import weights_directory
from tests.support import needs
from tests.support.leftovers import FAILED, Leftovers, held, of_another_session
from tests.support.needs import GPUS, REASONS, SWITCH, need, required
from tests.support.processes import read_pids, until
from tests.support.programs import programs
from tests.support.tiny import tiny_up, write_tiny


@pytest.fixture(autouse=True)
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with zmq and without Ray."""
    monkeypatch.setattr(needs, "REASONS", {**REASONS, "ray": lambda: "none", "zmq": lambda: ""})
    monkeypatch.delenv(SWITCH, raising=False)


@pytest.mark.parametrize("named", ["", "ray", "zmq, ray", "all"])
def test_what_is_missing_skips_or_fails_if_it_is_required_with_the_reason(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    if named:
        monkeypatch.setenv(SWITCH, named)
    need("zmq")
    with pytest.raises((pytest.fail if named else pytest.skip).Exception, match=r"^needs ray: none$"):
        need("ray")


def test_all_is_everything_but_gpus_and_a_need_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert required() == set()
    monkeypatch.setenv(SWITCH, "all")
    assert required() == REASONS.keys() - GPUS
    monkeypatch.setenv(SWITCH, "all,gpu")
    assert required() == REASONS.keys() - {"two gpus"}
    monkeypatch.setenv(SWITCH, "sglang,host")
    with pytest.raises(pytest.UsageError, match="got host"):
        required()


def missing(name: str) -> str:
    """Look for what is there now, whatever was found before."""
    return inspect.unwrap(REASONS[name])()


def test_what_a_need_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "redis-server" in missing("redis")
    assert "ip, unshare, mount" in missing("hosts")
    monkeypatch.setenv("SGLANG_PYTHON", "/nowhere/python")
    assert "make sglang-cpu" in missing("sglang")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "package zmq: " in missing("zmq")


ROOT = Path(__file__).parents[2]
CONFTEST = """
from pathlib import Path
from tests.support.leftovers import Leftovers
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Leftovers(Path("memory"), 0.5))
"""
LEAVES = "from pathlib import Path\ndef test_leaves():\n    Path('memory/run-7').mkdir()\n    Path('memory/run-7/version-3').touch()\n"
CLEANS = "from pathlib import Path\ndef test_cleans():\n    Path('memory/x').touch()\n    Path('memory/x').unlink()\n"


def session(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "memory").mkdir()
    (folder / "memory" / "of-before").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.process
@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "-n", "1")])
def test_what_is_left_fails_the_session_and_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "test_a.py").write_text(LEAVES)
    done = session(tmp_path, *arguments)
    assert done.returncode == FAILED and "run-7: version-3" in done.stdout and "of-before" not in done.stdout


@pytest.mark.process
def test_what_is_cleaned_up_does_not(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(CLEANS)
    done = session(tmp_path)
    assert (done.returncode, "left in" in done.stdout) == (0, False)


@pytest.mark.process
async def test_a_run_that_a_failed_test_leaves_up_frees_its_memory(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    run = RunDir(tmp_path / "runs" / "demo")
    memory = weights_directory(WeightsConfig(), "demo", run.path)
    with pytest.raises(ZeroDivisionError):
        async with programs(tmp_path) as start:
            process = await tiny_up(start)("endless")
            await until(lambda: len(read_pids(run.path / "pids")) == 5, within_s=60)
            memory.mkdir()
            raise ZeroDivisionError
    assert process.returncode == 130
    assert not memory.exists()


@pytest.mark.process
def test_versions_of_a_run_elsewhere_are_another_sessions(tmp_path: Path) -> None:
    run = tmp_path / "test_0" / "runs" / "demo"
    run.mkdir(parents=True)
    name = weights_directory(WeightsConfig(), "demo", run).name
    assert not of_another_session(name, tmp_path)
    assert of_another_session(name, tmp_path / "test_1")
    assert not of_another_session("sem.mp-x", tmp_path)


@pytest.mark.process
def test_what_a_living_process_uses_is_not_left(tmp_path: Path) -> None:
    leftovers = Leftovers(tmp_path, grace_s=0.3)
    (tmp_path / "folder").mkdir()
    for name in ("folder/open", "mapped", "nobodys"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    opens = "f = open(sys.argv[1]); g = open(sys.argv[2], 'r+b'); m = mmap.mmap(g.fileno(), 0); g.close()"
    code = f"import mmap, sys\n{opens}\nprint(flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path / "folder" / "open"), str(tmp_path / "mapped")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert held(tmp_path) == {"folder", "mapped"}
        assert leftovers.abandoned() == {"nobodys"}
        process.kill()
    assert leftovers.abandoned() == {"folder", "mapped", "nobodys"}
