"""One small run of the table backend, recorded once; most tests read the recording and need no server."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from streamrl.history import branch
from tests.support.printed import Printed, printed
from tests.support.recorded_run import FIXED, Recorded, make_recorded
from tests.support.shared import made_once
from tests.support.world.world import table_config


def make(base: Path) -> Recorded:
    config = table_config(base, run={"name": "parent", "steps": 16}, warmup={"max_steps": 3, "until": 1.0}, **FIXED)
    return asyncio.run(make_recorded(base, config))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return made_once(tmp_path_factory, "recorded", make)


Verb = Callable[..., Printed]


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Verb:
    """`verb(*words, code=0)`: what `streamrl ...` prints."""
    return partial(printed, capsys)


@pytest.fixture
def said(verb: Verb, request: pytest.FixtureRequest) -> Verb:
    """The same of the verb that a module is about, its `VERB`."""
    return partial(verb, request.module.VERB)


@pytest.fixture
def unplotted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch's plot is an empty file: drawing takes a third of the time of a short branch. test_command_line.py draws it."""
    monkeypatch.setattr(branch, "write_plot", lambda view, path: path.touch())
