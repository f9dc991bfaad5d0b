"""`streamrl trace` on the command line: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.cli import main
from tests.support.recorded_run import Recorded

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> Say:
    """Exit code, stdout and stderr of `streamrl trace RECORDING ...`."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["trace", *(argument.replace("RECORDING", str(recorded.path)) for argument in arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_verb(said: Say) -> None:
    code, out, err = said("RECORDING", "41")
    assert (code, err) == (0, "") and out.startswith("task 41 of run parent ")
    code, out, err = said("RECORDING", "41/2", "--json")
    life = json.loads(out)
    assert (code, life["task"], [one["rollout"] for one in life["rollouts"]]) == (0, 41, [2])


@pytest.mark.parametrize("place", ["", "x", "1/", "/1", "1/2/3", "1.5", "²", "1 2", "9" * 40, "0x1"])
def test_garbage_is_refused_with_what_was_expected(said: Say, place: str) -> None:
    code, out, err = said("RECORDING", place)
    assert (code, out) == (1, "") and "TASK/ROLLOUT" in err and "hint:" in err


def test_rollouts_runs_taps_and_branches_that_cannot_be_traced(said: Say, tmp_path: Path, recorded: Recorded) -> None:
    assert "of task 41, got 3" in said("RECORDING", "41/3")[2]
    code, _, err = said("nothing", "1", "--dir", str(tmp_path))
    assert code == 1 and err.startswith("error: ")
    code, _, err = said(f"{recorded.path}:nobody", "3")
    assert code == 1 and "'nobody'" in err
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    (tmp_path / "b" / "branch.json").write_text("{}")
    code, _, err = said("b", "1", "--dir", str(tmp_path))
    assert code == 1 and "branch 'b'" in err and "branch.json" in err
