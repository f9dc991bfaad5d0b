from __future__ import annotations

import io

import pytest

from streamrl.monitor.numbers import RunNumbers
from streamrl.monitor.slo import line_of
from streamrl.monitor.status import RunLine, RunStatus, print_status
from streamrl.monitor.waits import standing_line


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [io.StringIO, Tty])
def test_status_says_what_is_wrong_and_what_to_do_in_a_pipe_and_on_a_terminal(
    troubled: RunNumbers, out: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    stdout = out()
    monkeypatch.setattr("sys.stdout", stdout)
    line = RunLine(run="demo", path="runs/demo", state="running", supervisor=17, summary=None)
    print_status(RunStatus(line=line, numbers=troubled, checkpoints=("0.90", "0.80")), as_json=False)
    said = stdout.getvalue()
    assert out is io.StringIO or all(len(each) <= 80 for each in said.splitlines()), "nothing wraps"
    assert troubled.standing is not None
    for words in (
        standing_line(troubled.standing),
        *map(line_of, troubled.slo),
        troubled.newest_error,
        "0.90, 0.80; a restart can go back",
    ):
        assert words in said.replace("\n", "")
