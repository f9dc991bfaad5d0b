"""What is called green: `scripts.run_tests` over small folders of tests that pass, fail, die, or are not there."""

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
DIES = "import os, signal\ndef test_dies():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
SKIPS = "import pytest\ndef test_skips():\n    pytest.skip('needs gpu: none here')\n"
ALONE = "-p no:cacheprovider"
WORKERS = "-p no:cacheprovider -p xdist -n 2"
ODD_NAMES = "import pytest\n@pytest.mark.parametrize('x', ['a b', '[', 'é\\n::'])\ndef test_x(x):\n    pass\n"
TEARDOWN = "import pytest\n@pytest.fixture\ndef f():\n    yield\n    1 / 0\ndef test_a(f):\n    pass\n"
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


def wanting(test: str, why: str = "failed") -> str:
    return f"FAILED {why}: test_{test}"


KILLED = "pytest did not come to its end: status -9"
NOT_COLLECTED = "FAILED cannot be collected: test_b.py"
CASES: dict[str, tuple[list[str], str, str, list[str]]] = {
    "all pass": ([PASSES, ODD_NAMES], ALONE, "4/0", []),
    "all pass, in workers": ([PASSES, ODD_NAMES], WORKERS, "4/0", []),
    "one fails": ([PASSES + FAILS], ALONE, "1/1", [wanting("a.py::test_fails")]),
    "one fails, in workers": ([PASSES, FAILS], WORKERS, "1/1", [wanting("b.py::test_fails")]),
    "one fails after its test": ([TEARDOWN], ALONE, "0/1", [wanting("a.py::test_a")]),
    # Those after the one that died have no result either.
    "one kills pytest": (
        *([PASSES, DIES, PASSES], ALONE, "1/2"),
        [KILLED, wanting("b.py::test_dies", "no result"), wanting("c.py::test_passes", "no result")],
    ),
    "one ends pytest as if all were well": ([PASSES + LEAVES], ALONE, "1/1", ["pytest did not come to its end: status 0"]),
    "one kills its worker": ([PASSES, DIES, PASSES], WORKERS, "2/1", [wanting("b.py::test_dies")]),
    "a file that cannot be collected": ([PASSES, LOST], ALONE, "", [NOT_COLLECTED]),
    "a file that cannot be collected by workers": ([PASSES, LOST], WORKERS, "", [NOT_COLLECTED]),
    "no tests": ([], ALONE, "0/1", []),
    "no such option": ([], f"{ALONE} --no-such-option", "0/1", []),
    "no such test": ([PASSES], f"{ALONE} -k nothing", "0/1", []),
    "no such file": ([], f"{ALONE} nowhere", "0/1", []),
    "one run of two without tests": ([PASSES], f"{ALONE}|{ALONE} -k nothing", "1/1", []),
    "pytest dies before it collects": ([PASSES, KILLS_PYTEST], ALONE, "0/1", [f"FAILED no usable report or no tests: pytest {ALONE}"]),
    "pytest stops early": ([FAILS + PASSES], f"{ALONE} -x", "", [f"FAILED pytest {ALONE} -x ended without running all tests"]),
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
