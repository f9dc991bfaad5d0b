"""One small run of the table backend, recorded once; most tests read the recording and need no server."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from streamrl.cli import main
from streamrl.history import branch_run
from tests.support.recorded_run import FIXED, Recorded, make_recorded
from tests.support.shared import made_once
from tests.support.world.world import table_config


def make(base: Path) -> Recorded:
    config = table_config(base, run={"name": "parent", "steps": 16}, warmup={"max_steps": 3, "until": 1.0}, **FIXED)
    return asyncio.run(make_recorded(base, config))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return made_once(tmp_path_factory, "recorded", make)


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of `streamrl ...`."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def said(verb: Callable[..., tuple[int, str, str]], request: pytest.FixtureRequest) -> Callable[..., tuple[int, str, str]]:
    """The same of the verb that a module is about, its `VERB`."""
    return partial(verb, request.module.VERB)


@pytest.fixture
def unplotted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch's plot is an empty file: drawing takes a third of the time of a short branch. test_command_line.py draws it."""
    monkeypatch.setattr(branch_run, "write_plot", lambda view, path: path.touch())
