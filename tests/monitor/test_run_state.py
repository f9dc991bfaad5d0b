"""States that are shown of runs, and the verb that shows them."""

import io
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.config.tree import Config, RunConfig
from streamrl.monitor.failures import MOST_CHARS
from streamrl.monitor.numbers import RunNumbers, WorkerLine
from streamrl.monitor.run_state import LENGTHS_S, RunState, StateFile, read_state, write_state
from streamrl.monitor.slo import line_of
from streamrl.monitor.status import RunLine, RunStatus, describe, list_runs, print_runs, print_status, steps_text
from streamrl.monitor.waits import standing_line
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "demo")
    directory.create()
    directory.write_config(Config(run=RunConfig(name="demo")))
    return directory


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_how_a_session_ended_is_told_with_its_steps(run: RunDir, state: str) -> None:
    write_state(run, RunState(state=state, step=3, steps=9, error="producer: ValueError: no" if state == "failed" else ""))
    line = describe(run)
    assert (line.state, line.step, line.steps, steps_text(line)) == (state, 3, 9, "3/9")
    assert line.error == ("producer: ValueError: no" if state == "failed" else "")


def test_a_run_without_supervisor_was_interrupted_and_one_that_is_up_has_no_error(run: RunDir) -> None:
    write_state(run, RunState(state="running", step=3, steps=9))
    with lock_run(run):
        assert describe(run).state == "running"
    assert describe(run).state == "interrupted"
    write_state(run, RunState(state="failed", error="former"))
    with lock_run(run):
        assert describe(run).error == ""


@pytest.mark.parametrize("content", [None, b"", b'{"state": "fini', b"[]", b"\xff"])
def test_a_run_of_an_earlier_version_or_with_a_broken_file_is_stopped(run: RunDir, content: bytes | None) -> None:
    if content is not None:
        run.state_path.write_bytes(content)
    assert read_state(run) is None
    line = describe(run)
    assert (line.state, steps_text(line)) == ("stopped", "-")


def test_lengths_alone_are_written_rarely_and_all_else_at_once(run: RunDir) -> None:
    file = StateFile(run)

    def told(step: int, length: int, now_s: float, state: str = "running") -> RunState | None:
        file.tell(RunState(state=state, step=step, steps=9, lengths={"lengths/trained": (length,)}), now_s=now_s)
        return read_state(run)

    first = told(0, 1, 100.0)
    assert first is not None and first.lengths == {"lengths/trained": (1,)}
    assert told(0, 2, 101.0) == told(0, 3, 99.9 + LENGTHS_S) == first
    later = told(0, 4, 100.0 + LENGTHS_S)
    assert later is not None and later.lengths == {"lengths/trained": (4,)}
    assert told(0, 5, 101.0 + LENGTHS_S) == later
    step = told(1, 6, 102.0 + LENGTHS_S)
    assert step is not None and (step.step, step.lengths) == (1, {"lengths/trained": (6,)})
    assert told(1, 7, 103.0 + LENGTHS_S) == step
    end = told(1, 8, 104.0 + LENGTHS_S, "finished")
    assert end is not None and (end.state, end.lengths) == ("finished", {"lengths/trained": (8,)})


def test_a_disk_that_takes_no_state_ends_nothing_and_is_tried_again(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile(run)
    run.state_path.mkdir()
    file.tell(RunState(state="running"), now_s=0.0)
    assert "event=state_not_written" in caplog.text
    run.state_path.rmdir()
    file.tell(RunState(state="running", step=1), now_s=1.0)
    assert read_state(run) == RunState(state="running", step=1)


def test_a_run_that_is_prepared_or_lies_in_brackets_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "new")
    run.create()
    with lock_run(run):
        assert [(line.run, line.state) for line in list_runs(tmp_path)] == [("new", "preparing")]
        print_runs(list_runs(tmp_path), as_json=False)
        assert "preparing" in capsys.readouterr().out
    assert [line.state for line in list_runs(tmp_path)] == ["interrupted"]
    base = tmp_path / "[b]" / "[" / "red]"
    run = RunDir(base / "demo")
    run.create()
    run.write_config(Config(run=RunConfig(name="demo")))
    print_runs(list_runs(base), as_json=False)
    assert "[/red]" in "".join(capsys.readouterr().out.split())


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
