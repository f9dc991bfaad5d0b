"""A pytest plugin that writes what was collected and how each test ended, one line of JSON at a time: what is written stays, whoever dies.

    python -m pytest -p scripts.outcomes --outcomes=FILE [--only=FILE]

The file's lines are `{"collected": [node ids]}`, `{"test": node id, "when": phase, "outcome": ..., "reason": why it was skipped,
"seconds": what it took, "core_s": processor time of this process and of those that it has waited for}`, `{"broken": node id, "error":
...}` for what cannot be collected, and `{"exit": status}` at the end. With pytest-xdist the controller writes; a worker that dies is a
failure of the test that it ran. `scripts.run_tests` reads them.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("outcomes")
    group.addoption("--outcomes", help="write what is collected and how each test ends to this file")
    group.addoption("--only", help="run only the node ids in this file: a JSON list")


def pytest_configure(config: pytest.Config) -> None:
    """Register the writer, in the process that hears of all tests."""
    path: str | None = config.getoption("--outcomes")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(Path(path)), "outcomes-writer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what `--only` names."""
    path: str | None = config.getoption("--only")
    if path:
        only = set(json.loads(Path(path).read_text(encoding="utf-8")))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in only])
        items[:] = [item for item in items if item.nodeid in only]


def core_s() -> float:
    """Processor time of this process and of all that it, and they, have waited for, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


_before_s = 0.0


def pytest_runtest_logstart() -> None:
    """Count from here, where the test runs."""
    global _before_s
    _before_s = core_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give each phase's report the processor time since the one before; pytest-xdist sends it to the controller."""
    global _before_s
    report = yield
    now = core_s()
    vars(report)["core_s"], _before_s = round(now - _before_s, 3), now
    return report


class Writer:
    """Writes lines as things happen."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._collected: set[str] = set()

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _collect(self, ids: list[str]) -> None:
        if fresh := [one for one in ids if one not in self._collected]:
            self._collected.update(fresh)
            self._write(collected=fresh)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without workers."""
        self._collect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Each worker collects all tests."""
        self._collect(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file or folder that cannot be collected, or that is skipped as a whole: its tests are not counted otherwise."""
        if report.failed:
            self._write(broken=report.nodeid, error=report.longreprtext)
        elif report.skipped:
            self._write(test=report.nodeid, when="collect", outcome="skipped", reason=reason(report), seconds=0.0, core_s=0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        skipped = report.skipped and not hasattr(report, "wasxfail")
        outcome = "skipped" if skipped else "failed" if report.failed else "passed"
        why = reason(report) if skipped else ""
        core = getattr(report, "core_s", 0.0)
        self._write(test=report.nodeid, when=report.when, outcome=outcome, reason=why, seconds=round(report.duration, 2), core_s=core)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """The session's own end, after hooks that may change its status."""
        self._write(exit=int(session.exitstatus))
        self._file.close()


def reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why something was skipped."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return text.removeprefix("Skipped: ")
