"""Removing runs: what is refused, what goes, and what stays when it is cut short."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli import main
from streamrl.config.tree import BusConfig, Config, ModelConfig, RunConfig, WeightsConfig
from streamrl.errors import ConfigError, LaunchError
from streamrl.launch.remove import check_free, removable, remove_run
from streamrl.launch.up import up
from streamrl.monitor.run_state import REMOVING, RunState, write_state
from streamrl.monitor.runs import list_runs
from streamrl.monitor.screen import PlainLines
from streamrl.runtime.lock import holder, lock_run
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from streamrl.weights.factory import weights_directory
from tests.support.errors import raises
from tests.support.runs import bare_run, named_run


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs `first` and `second`, each with a checkpoint; the working directory holds `runs`."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        started(named_run(tmp_path / "runs" / name))
    return tmp_path / "runs"


def started(run: RunDir) -> RunDir:
    run.lock_path.touch()
    (run.checkpoints / "main-0").mkdir()
    (run.checkpoints / "main-0" / "weights").write_bytes(b"x" * 100)
    return run


def names(base: Path) -> list[str]:
    return sorted(line.run for line in list_runs(base))


def test_a_run_goes_with_its_links_and_shared_memory_and_nothing_outside(base: Path, tmp_path: Path) -> None:
    run = RunDir(base / "first")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("kept")
    (run.path / "link").symlink_to(tmp_path / "data")
    (run.checkpoints / "rows").symlink_to(tmp_path / "data" / "rows")
    shared = weights_directory(WeightsConfig(), run.name, run.path)
    shared.mkdir()
    try:
        assert remove_run(removable("first", base=base)) == ""
        assert not shared.exists()
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    assert names(base) == ["second"] and sorted(os.listdir(base)) == ["second"]
    assert (tmp_path / "data" / "rows").read_text() == "kept"


@pytest.mark.parametrize("text", ["first", "runs/first", "runs/first/", "runs/../runs/first", "runs/second/../first", "{base}/first"])
def test_a_run_is_named_or_its_directory_given(base: Path, text: str) -> None:
    assert removable(text.format(base=base), base="runs").path == base / "first"


def test_the_working_directory_may_be_the_run(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base / "first" / "logs")
    assert removable("..", base="runs").path == base / "first"


def linked(base: Path) -> str:
    (base / "link").symlink_to(base / "first")
    return "link"


def model_folder(base: Path) -> str:
    (base / "model").mkdir()
    (base / "model" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    return "model"


def foreign_lock(base: Path) -> str:
    """Another program's folder with a lock and a configuration."""
    folder = base / model_folder(base)
    (folder / "lock").touch()
    return folder.name


def not_json(base: Path) -> str:
    (base / model_folder(base) / "config.json").write_text("[1, 2")
    return "model"


def no_run(base: Path) -> str:
    (base / "notes").mkdir()
    return "notes"


@pytest.mark.parametrize("text", ["", "/", ".", "..", "first/logs", "runs", "a b", "../runs", "first/../../runs"])
def test_a_path_that_leads_to_no_run_is_refused(base: Path, text: str) -> None:
    with raises(ConfigError, run=text):
        removable(text, base=base)


@pytest.mark.parametrize("make", [linked, model_folder, foreign_lock, not_json, no_run])
def test_what_may_be_no_run_is_refused(base: Path, make: Callable[[Path], str]) -> None:
    text = make(base)
    before = sorted(map(str, base.rglob("*")))
    with pytest.raises(ConfigError) as caught:
        removable(text, base=base)
    assert caught.value.hint
    assert sorted(map(str, base.rglob("*"))) == before


@pytest.mark.parametrize("prepared", [True, False])
def test_a_run_that_is_up_or_being_started_is_refused(base: Path, prepared: bool) -> None:
    run = RunDir(base / "first") if prepared else bare_run(base / "new")
    with lock_run(run):
        with raises(LaunchError, run=run.name, pid=os.getpid()):
            removable(run.name, base=base)
        with raises(LaunchError, pid=os.getpid()):  # one that was started since
            remove_run(run)
    assert run.path.is_dir() and run.credentials.is_dir()


def half_started(base: Path) -> RunDir:
    run = bare_run(base / "odd")
    run.lock_path.touch()
    return run


def of_a_later_version(base: Path) -> RunDir:
    run = started(bare_run(base / "odd"))
    run.config_path.write_text('{"run": {"name": "odd", "warp": 9}, "later": {}}')
    return run


def with_a_damaged_configuration(base: Path) -> RunDir:
    run = started(bare_run(base / "odd"))
    run.config_path.write_text("{")
    return run


def without_most_files(base: Path) -> RunDir:
    run = started(named_run(base / "odd"))
    for path in (run.credentials, run.logs, run.checkpoints, run.bus_store):
        shutil.rmtree(path)
    return run


def with_a_lock_alone(base: Path) -> RunDir:
    run = RunDir(base / "odd")
    run.path.mkdir()
    run.lock_path.touch()
    return run


def with_a_lock_and_a_state(base: Path) -> RunDir:
    run = with_a_lock_alone(base)
    write_state(run, RunState(state=REMOVING))
    return run


def branch_without_lock(base: Path) -> RunDir:
    run = named_run(base / "odd")
    (run.path / BRANCH_FILE).write_text('{"parent": "first"}')
    return run


ODD = [
    *(half_started, of_a_later_version, with_a_damaged_configuration, without_most_files),
    *(with_a_lock_alone, with_a_lock_and_a_state, branch_without_lock),
]


@pytest.mark.parametrize("make", ODD)
def test_runs_that_are_half_there_or_of_another_version_can_be_removed(base: Path, make: Callable[[Path], RunDir]) -> None:
    run = make(base)
    remove_run(removable("odd", base=base))
    assert not run.path.exists() and names(base) == ["first", "second"]


def test_streams_on_a_cluster_are_said_to_stay(base: Path) -> None:
    run = started(named_run(base / "third", bus=BusConfig(url="nats://user:secret@example:4222")))
    left = remove_run(removable("third", base=base))
    assert "bus.url" in left and "secret" not in left
    assert not run.path.exists()


def test_a_removal_that_is_cut_short_leaves_a_run_that_can_be_removed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.rmtree

    def refuses(path: str, *arguments: Any, **named: Any) -> None:
        if path.endswith("checkpoints"):
            raise PermissionError(13, "Permission denied", path)
        real(path, *arguments, **named)

    monkeypatch.setattr(shutil, "rmtree", refuses)
    with raises(LaunchError, run="first", path=str(base / "first" / "checkpoints")):
        remove_run(removable("first", base=base))
    assert {line.run: line.state for line in list_runs(base)}["first"] == "removing"
    monkeypatch.undo()
    remove_run(removable("first", base=base))
    assert names(base) == ["second"]


def test_what_is_left_of_a_start_whose_removal_was_cut_short_can_be_removed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = half_started(base), shutil.rmtree

    def refuses(path: str, *arguments: Any, **named: Any) -> None:
        if path == str(run.credentials):
            raise PermissionError(13, "Permission denied", path)
        real(path, *arguments, **named)

    monkeypatch.setattr(shutil, "rmtree", refuses)
    with raises(LaunchError, run="odd", path=str(run.credentials)):
        remove_run(removable("odd", base=base))
    monkeypatch.undo()
    assert sorted(os.listdir(run.path)) == sorted(path.name for path in (run.credentials, run.lock_path, run.state_path))
    remove_run(removable("odd", base=base))
    assert names(base) == ["first", "second"]


async def test_a_run_whose_removal_has_begun_does_not_start_again(base: Path) -> None:
    run = RunDir(base / "first")
    write_state(run, RunState(state=REMOVING))
    before = sorted(map(str, run.path.rglob("*")))
    with raises(LaunchError, run="first"):
        await up(Config(run=RunConfig(name="first", dir=str(base))), PlainLines(io.StringIO()))
    assert sorted(map(str, run.path.rglob("*"))) == before and holder(run) is None


def branch_of(base: Path, parent: str) -> str:
    (named_run(base / "branch").path / BRANCH_FILE).write_text(f'{{"parent": "{parent}"}}')
    return "branch"


def begun_with(base: Path, parent: str) -> str:
    """A run whose policy is an export of `parent`, by a path through a link."""
    (base.parent / "alias").symlink_to(base)
    started(named_run(base / "later", model=ModelConfig(path=str(base.parent / "alias" / parent / "hf" / "v00000007"))))
    return "later"


@pytest.mark.parametrize("make", [branch_of, begun_with])
def test_a_run_that_others_depend_on_stays_unless_they_go_too(base: Path, make: Callable[[Path, str], str]) -> None:
    dependent = make(base, "first")
    with raises(ConfigError, run="first", dependents=[dependent]):
        check_free([removable("first", base=base)])
    check_free([removable(name, base=base) for name in ("first", dependent)])
    check_free([removable(name, base=base) for name in ("second", dependent)])
    assert main(["runs", "rm", "first", "--yes", "--dir", str(base)]) == 1
    assert main(["runs", "rm", "first", "--yes", "--force", "--dir", str(base)]) == 0
    assert names(base) == sorted(["second", dependent])


def test_a_run_beside_it_that_cannot_be_read_says_nothing(base: Path) -> None:
    (base / "second" / "config.json").write_text('{"first": "\\u0000/x", "deep": ' + "[" * 2000 + "]" * 2000 + "}")
    (base / "second" / BRANCH_FILE).mkdir()
    check_free([removable("first", base=base)])


@pytest.mark.parametrize(
    ("answer", "code", "left"), [("y", 0, ["second"]), ("YES ", 0, ["second"]), ("", 1, None), ("n", 1, None), (EOFError, 1, None)]
)
def test_who_sits_at_a_terminal_is_asked(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Any, code: int, left: list[str] | None
) -> None:
    def asked(question: str) -> str:
        if answer is EOFError:
            raise EOFError
        return str(answer)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", asked)
    assert main(["runs", "rm", "first", "runs/first"]) == code
    assert names(base) == (left or ["first", "second"])
    assert str(base / "first") in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("first",), ("first", "nobody", "--yes"), ("nobody", "first", "--yes", "--force")])
def test_without_a_terminal_or_with_an_unknown_name_nothing_goes(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["runs", "rm", *arguments]) == 1
    assert "\nhint: " in capsys.readouterr().err
    assert names(base) == ["first", "second"]


def test_the_directory_is_taken_before_and_behind_the_action(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chdir("/")
    for arguments in (["--dir", str(base), "note", "first", "hello"], ["note", "second", "there", "--dir", str(base)]):
        assert main(["runs", *arguments]) == 0
    assert main(["runs", "--dir", str(base)]) == 0
    out = capsys.readouterr().out
    assert "hello" in out and "there" in out and f"2 runs in {base}" in out
    assert main(["runs", "note", str(base / "first")]) == 0
    assert capsys.readouterr().out == "hello\n"


def test_a_note_that_cannot_be_written_is_said(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "first" / "note.txt").mkdir()
    assert main(["runs", "note", "first", "text"]) == 1
    assert "note.txt" in capsys.readouterr().err
