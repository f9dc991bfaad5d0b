"""Tests of what is called green: `scripts.run_tests` over small folders of tests that pass, fail, come back, die, or are not there."""

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
ODD_NAMES = "import pytest\n@pytest.mark.parametrize('x', ['a b', '[', 'é\\n::'])\ndef test_x(x):\n    pass\n"
TEARDOWN = "import pytest\n@pytest.fixture\ndef f():\n    yield\n    1 / 0\ndef test_a(f):\n    pass\n"
FIRST = "import pathlib\ndef test_first():\n    pathlib.Path('first').touch(exist_ok=False)\n"
LEAVES = "def test_leaves():\n    import os\n    os._exit(0)\n"
LOST = "import nothing_of_this_name\n"
SKIPS_ITSELF = "import pytest\npytest.importorskip('nothing_of_this_name')\n"
KILLS_PYTEST = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
SPOILS = "def pytest_sessionfinish(session):\n    session.exitstatus = 1\n"


class Said(NamedTuple):
    """What the command ended with and printed as its own."""

    code: int
    lines: list[str]
    closing: str

    def has(self, line: str) -> bool:
        return f"tests: {line}" in self.lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> Said:
    command, pipe = [sys.executable, "-m", "scripts.run_tests", *arguments], subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    return Said(done.returncode, [line for line in lines if line.startswith("tests: ")], lines[-1])


def retried(test: str, first: str, then: str = "passed") -> str:
    return f"retried: test_{test}: first {first}, then {then}"


def wanting(test: str, why: str = "failed") -> str:
    return f"FAILED {why}: test_{test}"


def again(passed: int) -> str:
    return f"1 tests ran once more, alone; {passed} of them passed then:"


RETRY, RETRY_WORKERS = f"{ALONE}|--retry", f"{WORKERS}|--retry"
KILLED = "pytest did not come to its end: status -9"
NOT_COLLECTED = "FAILED cannot be collected: test_b.py"
CASES: dict[str, tuple[list[str], str, str, list[str]]] = {
    "all pass": ([PASSES, ODD_NAMES], RETRY, "4/0", []),
    "all pass, in workers": ([PASSES, ODD_NAMES], RETRY_WORKERS, "4/0", []),
    "one fails once": ([PASSES, FAILS_ONCE], RETRY, "2/0", [again(1), retried("b.py::test_comes_back", "failed")]),
    "one fails once, in workers": ([PASSES, FAILS_ONCE], RETRY_WORKERS, "2/0", [again(1)]),
    "one fails once, and nothing is retried": ([PASSES, FAILS_ONCE], ALONE, "1/1", []),
    "one always fails": ([PASSES + FAILS], RETRY, "1/1", [retried("a.py::test_fails", *["failed"] * 2), wanting("a.py::test_fails")]),
    "one fails after its test": ([TEARDOWN], RETRY, "0/1", [retried("a.py::test_a", "failed", "failed")]),
    # Those after the one that died have no result either; one that passed before it is not run again.
    "one kills pytest once": (
        *([FIRST, DIES_ONCE, PASSES], RETRY, "3/0"),
        [KILLED, retried("b.py::test_dies_once", "no result"), retried("c.py::test_passes", "no result")],
    ),
    "one kills pytest once, and nothing is retried": ([PASSES, DIES_ONCE], ALONE, "1/1", []),
    "one always kills pytest": (
        *([PASSES, DIES, PASSES], RETRY, "1/2"),
        [retried("b.py::test_dies", *["no result"] * 2), wanting("c.py::test_passes", "no result")],
    ),
    "one ends pytest as if all were well": ([PASSES + LEAVES], RETRY, "1/1", ["pytest did not come to its end: status 0"]),
    "one kills its worker once": ([PASSES, DIES_ONCE, PASSES], RETRY_WORKERS, "3/0", [again(1)]),
    "one always kills its worker": ([PASSES, DIES, PASSES], RETRY_WORKERS, "2/1", [again(0)]),
    "a file that cannot be collected": ([PASSES, LOST], ALONE, "", [NOT_COLLECTED]),
    "a file that cannot be collected by workers": ([PASSES, LOST], WORKERS, "", [NOT_COLLECTED]),
    "no tests": ([], ALONE, "0/1", []),
    "no such option": ([], f"{ALONE} --no-such-option", "0/1", []),
    "no such test": ([PASSES], f"{ALONE} -k nothing", "0/1", []),
    "no such file": ([], f"{ALONE} nowhere", "0/1", []),
    "one run of two without tests": ([PASSES], f"{ALONE}|{ALONE} -k nothing", "1/1", []),
    "pytest dies before it collects": ([PASSES, KILLS_PYTEST], ALONE, "0/1", [f"FAILED no usable report or no tests: pytest {ALONE}"]),
    "pytest stops early": ([FAILS_ONCE + PASSES], f"{ALONE} -x|--retry", "", [f"FAILED pytest {ALONE} -x ended without running all tests"]),
    "the session fails though its tests pass": ([PASSES, SPOILS], ALONE, "1/1", []),
    "one may be skipped": ([PASSES, SKIPS], f"{ALONE}|--may-skip|needs gpu:", "1/0", ["skipped 1, as it may be: needs gpu: none here"]),
    "one may not be skipped": (
        *([PASSES, SKIPS], f"{ALONE}|--may-skip|needs redis:", "1/1"),
        [wanting("b.py::test_skips: needs gpu: none here", "skipped")],
    ),
    "a file skips itself": ([PASSES, SKIPS_ITSELF + PASSES], f"{ALONE}|--may-skip|needs gpu:", "1/1", []),
    "a step before the tests has failed": ([PASSES], f"{ALONE}|--also-failed|the quickstart", "1/1", ["FAILED the quickstart"]),
}
"""Files of tests (or conftest.py), arguments between bars, how many pass and fail (or that some do), and the beginnings of lines."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_called_green(folder: Path, case: str) -> None:
    files, arguments, closing, lines = CASES[case]
    for name, text in zip("abc", files, strict=False):
        (folder / ("conftest.py" if text in (KILLS_PYTEST, SPOILS) else f"test_{name}.py")).write_text(text)
    said = run(folder, *arguments.split("|"))
    passed, _, failed = closing.partition("/")
    assert said.closing.endswith(f"{passed} passed, {failed} failed" if closing else " failed")
    assert (said.code == 0) == (failed == "0") == said.closing.endswith(" 0 failed")
    assert [line for line in lines if not any(one.startswith(f"tests: {line}") for one in said.lines)] == []
    assert lines or not any("retried" in line for line in said.lines)


def test_runs_that_are_made_together_are_read_each_by_itself(folder: Path) -> None:
    """Each waits for the other to have begun."""
    for one, other in (("a", "b"), ("b", "a")):
        (folder / f"test_{one}.py").write_text(
            "import pathlib, time\ndef test_meets():\n"
            f"    pathlib.Path('{one}').touch()\n    while not pathlib.Path('{other}').exists():\n        time.sleep(0.01)\n"
            f"    print('met', flush=True)\n    assert '{one}' == 'a'\n"
        )
    said = run(folder, "--together", f"{ALONE} -s test_a.py", f"{ALONE} -s test_b.py")
    assert (said.code, said.closing) == (1, "1 passed, 1 failed")
    assert said.has(f"what pytest {ALONE} -s test_b.py printed:") and said.has("FAILED failed: test_b.py::test_meets")
    assert sum(line.startswith("tests: slowest: ") for line in said.lines) == 2


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


def test_a_report_that_is_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    lines = [{"collected": ["a", "b"]}, *({"test": "a", "when": when, "outcome": "passed", "reason": ""} for when in ("call", "teardown"))]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "report").write_text(text + '{"test": "b", "wh')
    report = read(tmp_path / "report")
    assert (report.passed, report.wanting, report.exit) == ({"a"}, {"b": "no result"}, None)
    (tmp_path / "report").write_text('{"coll\n' + text)
    with pytest.raises(ValueError):
        read(tmp_path / "report")
