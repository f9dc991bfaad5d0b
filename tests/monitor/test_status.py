from __future__ import annotations

import io

import pytest
from msgspec.structs import replace

from streamrl.monitor.failures import MOST_CHARS
from streamrl.monitor.numbers import RunNumbers, WorkerLine
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
        assert words in said.replace("\n", " ")


def test_why_a_run_failed_is_one_line_of_bounded_length_without_commands_for_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    error = "the newest: failed:\n\x1b[2J[bold]\x1b]0;owned\x07 " + "x" * 100_000
    line = RunLine(run="demo", path="runs/demo", state="failed", supervisor=None, error=error, summary=None)
    print_status(RunStatus(line=line, numbers=None), as_json=False)
    (first, why) = capsys.readouterr().out.splitlines()
    assert first.startswith("run demo is failed")
    assert why.startswith("the newest: failed: \N{MIDDLE DOT}[2J[bold]\N{MIDDLE DOT}]0;owned\N{MIDDLE DOT} xxx")
    assert len(why) == MOST_CHARS and why.endswith("...")


def test_what_is_said_of_a_run_in_a_pipe_holds_no_command_for_a_terminal(troubled: RunNumbers, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = "failed: \x1b[2J\nat\u202e last"
    workers = (WorkerLine(worker="producer-0", state=nasty, failed_rollouts=3),)
    line = RunLine(run="demo", path="runs/demo", state="running", supervisor=17, summary=None)
    numbers = replace(troubled, newest_error=nasty, workers=workers)
    print_status(RunStatus(line=line, numbers=numbers), as_json=False)
    said = capsys.readouterr().out
    assert not {"\x1b", "\u202e"} & set(said)
    assert "newest failure: failed: \N{MIDDLE DOT}[2J at\N{MIDDLE DOT} last\n" in said
    assert "; 3 rollouts failed lately\n" in said
