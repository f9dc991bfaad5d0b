"""What is called green: `scripts.run_tests` over small folders of tests that pass, fail, come back, die, or are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.run_tests import read

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    raise AssertionError('always')\n"
ONCE = """
import os, pathlib, signal
def once(then):
    mark = pathlib.Path('was-here')
    if not mark.exists():
        mark.touch()
        then()
"""
FAILS_ONCE = ONCE + "def test_comes_back():\n    once(lambda: 1 / 0)\n"
DIES = "import os, signal\ndef test_dies():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
DIES_ONCE = ONCE + "def test_dies_once():\n    once(lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
SKIPS = "import pytest\ndef test_skips():\n    pytest.skip('needs gpu: none here')\n"
ALONE = "-p no:cacheprovider"
WORKERS = "-p no:cacheprovider -p xdist -n 2"


class Said(NamedTuple):
    """What the command ended with and printed as its own."""

    code: int
    lines: list[str]
    closing: str

    def has(self, line: str) -> bool:
        return f"tests: {line}" in self.lines

    def retried(self, test: str, first: str, then: str) -> bool:
        return self.has(f"retried: {test}: first {first}, then {then}")

    def again(self, tests: int, *, passed: int) -> bool:
        return self.has(f"{tests} tests ran once more, alone; {passed} of them passed then:")

    def died(self, status: int) -> bool:
        return self.has(f"pytest did not come to its end: status {status}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> Said:
    """As CI does."""
    return strictly(folder, "--retry", *arguments)


def strictly(folder: Path, *arguments: str) -> Said:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.run_tests", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    return Said(done.returncode, [line for line in lines if line.startswith("tests: ")], lines[-1])


@pytest.mark.parametrize("arguments", [ALONE, WORKERS])
def test_all_pass(folder: Path, arguments: str) -> None:
    (folder / "test_a.py").write_text(PASSES)
    (folder / "test_b.py").write_text("import pytest\n@pytest.mark.parametrize('x', ['a b', '[', 'é\\n::'])\ndef test_x(x):\n    pass\n")
    said = run(folder, arguments)
    assert (said.code, said.closing) == (0, "4 passed, 0 failed")
    assert not any("retried" in line for line in said.lines)


@pytest.mark.parametrize("arguments", [ALONE, WORKERS])
def test_one_that_fails_and_then_passes_is_named_and_counted(folder: Path, arguments: str) -> None:
    (folder / "test_a.py").write_text(PASSES)
    (folder / "test_b.py").write_text(FAILS_ONCE)
    said = run(folder, arguments)
    assert (said.code, said.closing) == (0, "2 passed, 0 failed")
    assert said.again(1, passed=1)
    assert said.retried("test_b.py::test_comes_back", "failed", "passed")


def test_runs_that_are_made_together_are_read_each_by_itself(folder: Path) -> None:
    """Each waits for the other to have begun."""
    for one, other in (("a", "b"), ("b", "a")):
        (folder / f"test_{one}.py").write_text(
            "import pathlib, time\ndef test_meets():\n"
            f"    pathlib.Path('{one}').touch()\n    while not pathlib.Path('{other}').exists():\n        time.sleep(0.01)\n"
            f"    print('met', flush=True)\n    assert '{one}' == 'a'\n"
        )
    said = strictly(folder, "--together", f"{ALONE} -s test_a.py", f"{ALONE} -s test_b.py")
    assert (said.code, said.closing) == (1, "1 passed, 1 failed")
    assert said.has(f"what pytest {ALONE} -s test_b.py printed:") and said.has("FAILED failed: test_b.py::test_meets")
    assert sum(line.startswith("tests: slowest: ") for line in said.lines) == 2


def test_one_that_always_fails(folder: Path) -> None:
    (folder / "test_a.py").write_text(PASSES + FAILS)
    said = run(folder, ALONE)
    assert (said.code, said.closing) == (1, "1 passed, 1 failed")
    assert said.retried("test_a.py::test_fails", "failed", "failed")
    assert said.has("FAILED failed: test_a.py::test_fails")


def test_slow_ones_are_left_out_where_that_is_asked_for_and_it_is_said(folder: Path) -> None:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: slow\n    soak: one\n")
    more = ("slow", "soak")
    (folder / "test_a.py").write_text(
        PASSES + "import pytest\n" + "".join(f"@pytest.mark.{one}\ndef test_{one}():\n    assert False\n" for one in more)
    )
    slow, soak = (f"; tests marked {one} were left out: {by} runs them" for one, by in zip(more, (".ci/run", "make soak"), strict=True))
    said = run(folder, "--tier", "test", ALONE)
    assert (said.code, said.closing) == (0, f"1 passed, 0 failed{slow}{soak}")
    assert run(folder, "--tier", "ci", ALONE).closing == f"1 passed, 1 failed{soak}"
    assert run(folder, ALONE).closing == "1 passed, 2 failed"


@pytest.mark.parametrize("test", [FAILS_ONCE, DIES_ONCE])
def test_without_a_retry_what_has_not_passed_has_failed(folder: Path, test: str) -> None:
    (folder / "test_a.py").write_text(PASSES)
    (folder / "test_b.py").write_text(test)
    said = strictly(folder, ALONE)
    assert (said.code, said.closing) == (1, "1 passed, 1 failed")
    assert not any("retried" in line for line in said.lines)


def test_a_failure_after_the_test_counts(folder: Path) -> None:
    (folder / "test_a.py").write_text("import pytest\n@pytest.fixture\ndef f():\n    yield\n    1 / 0\ndef test_a(f):\n    pass\n")
    said = run(folder, ALONE)
    assert (said.code, said.closing) == (1, "0 passed, 1 failed")


def test_a_killed_pytest_is_not_green_and_the_tests_without_result_run(folder: Path) -> None:
    """Those after the one that died have no result either; one that passed before it is not run again."""
    (folder / "test_a.py").write_text("import pathlib\ndef test_first():\n    pathlib.Path('first').touch(exist_ok=False)\n")
    (folder / "test_b.py").write_text(DIES_ONCE)
    (folder / "test_c.py").write_text(PASSES)
    said = run(folder, ALONE)
    assert (said.code, said.closing) == (0, "3 passed, 0 failed")
    assert said.died(-9)
    assert said.retried("test_b.py::test_dies_once", "no result", "passed")
    assert said.retried("test_c.py::test_passes", "no result", "passed")


def test_one_that_always_kills_its_process(folder: Path) -> None:
    (folder / "test_a.py").write_text(PASSES)
    (folder / "test_b.py").write_text(DIES)
    (folder / "test_c.py").write_text(PASSES)
    said = run(folder, ALONE)
    assert (said.code, said.closing) == (1, "1 passed, 2 failed")
    assert said.retried("test_b.py::test_dies", "no result", "no result")
    assert said.has("FAILED no result: test_c.py::test_passes")


def test_one_that_ends_the_process_as_if_all_were_well(folder: Path) -> None:
    (folder / "test_a.py").write_text(PASSES + "def test_leaves():\n    import os\n    os._exit(0)\n")
    said = run(folder, ALONE)
    assert (said.code, said.closing) == (1, "1 passed, 1 failed")
    assert said.died(0)


@pytest.mark.parametrize(("dies", "code", "closing"), [(DIES_ONCE, 0, "3 passed, 0 failed"), (DIES, 1, "2 passed, 1 failed")])
def test_a_worker_that_dies(folder: Path, dies: str, code: int, closing: str) -> None:
    (folder / "test_a.py").write_text(PASSES)
    (folder / "test_b.py").write_text(dies)
    (folder / "test_c.py").write_text(PASSES)
    said = run(folder, WORKERS)
    assert (said.code, said.closing) == (code, closing)
    assert said.again(1, passed=int(code == 0))


@pytest.mark.parametrize("arguments", [ALONE, WORKERS])
def test_a_file_that_cannot_be_collected(folder: Path, arguments: str) -> None:
    (folder / "test_a.py").write_text(PASSES)
    (folder / "test_b.py").write_text("import nothing_of_this_name\n")
    said = run(folder, arguments)
    assert said.code == 1
    assert said.closing.endswith(" failed") and not said.closing.endswith(" 0 failed")
    assert any(line.startswith("tests: FAILED cannot be collected: test_b.py") for line in said.lines)


@pytest.mark.parametrize("arguments", [ALONE, f"{ALONE} --no-such-option", f"{ALONE} -k nothing", f"{ALONE} nowhere"])
def test_no_tests_are_no_success(folder: Path, arguments: str) -> None:
    if "-k" in arguments:
        (folder / "test_a.py").write_text(PASSES)
    said = run(folder, arguments)
    assert (said.code, said.closing) == (1, "0 passed, 1 failed")


def test_one_run_without_tests_spoils_the_others(folder: Path) -> None:
    (folder / "test_a.py").write_text(PASSES)
    said = run(folder, ALONE, f"{ALONE} -k nothing")
    assert (said.code, said.closing) == (1, "1 passed, 1 failed")


def test_a_pytest_that_dies_before_it_collects_leaves_no_report(folder: Path) -> None:
    (folder / "test_a.py").write_text(PASSES)
    (folder / "conftest.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    said = run(folder, ALONE)
    assert (said.code, said.closing) == (1, "0 passed, 1 failed")
    assert said.has(f"FAILED no usable report or no tests: pytest {ALONE}")


def test_a_run_that_stops_early_is_no_success(folder: Path) -> None:
    (folder / "test_a.py").write_text(FAILS_ONCE + PASSES)
    said = run(folder, f"{ALONE} -x")
    assert said.code == 1
    assert said.has(f"FAILED pytest {ALONE} -x ended without running all tests")


def test_a_session_that_fails_though_its_tests_pass(folder: Path) -> None:
    (folder / "test_a.py").write_text(PASSES)
    (folder / "conftest.py").write_text("def pytest_sessionfinish(session):\n    session.exitstatus = 1\n")
    said = run(folder, ALONE)
    assert (said.code, said.closing) == (1, "1 passed, 1 failed")


@pytest.mark.parametrize("may", [True, False])
def test_a_skipped_test_is_a_failure_unless_it_may_be(folder: Path, may: bool) -> None:
    (folder / "test_a.py").write_text(PASSES)
    (folder / "test_b.py").write_text(SKIPS)
    said = run(folder, ALONE, *(("--may-skip", "needs gpu:") if may else ("--may-skip", "needs redis:")))
    assert (said.code, said.closing) == ((0, "1 passed, 0 failed") if may else (1, "1 passed, 1 failed"))
    assert said.has("skipped 1, as it may be: needs gpu: none here") is may
    assert said.has("FAILED skipped: test_b.py::test_skips: needs gpu: none here") is not may


def test_a_file_that_skips_itself_is_a_failure(folder: Path) -> None:
    (folder / "test_a.py").write_text(PASSES)
    (folder / "test_b.py").write_text("import pytest\npytest.importorskip('nothing_of_this_name')\n" + PASSES)
    said = run(folder, ALONE, "--may-skip", "needs gpu:")
    assert (said.code, said.closing) == (1, "1 passed, 1 failed")


def test_a_step_before_the_tests_counts(folder: Path) -> None:
    (folder / "test_a.py").write_text(PASSES)
    said = run(folder, ALONE, "--also-failed", "the quickstart")
    assert (said.code, said.closing) == (1, "1 passed, 1 failed")
    assert said.has("FAILED the quickstart")


def test_a_report_that_is_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    lines = [{"collected": ["a", "b"]}, *({"test": "a", "when": when, "outcome": "passed", "reason": ""} for when in ("call", "teardown"))]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "report").write_text(text + '{"test": "b", "wh')
    report = read(tmp_path / "report")
    assert (report.passed, report.wanting, report.exit) == ({"a"}, {"b": "no result"}, None)
    (tmp_path / "report").write_text('{"coll\n' + text)
    with pytest.raises(ValueError):
        read(tmp_path / "report")
